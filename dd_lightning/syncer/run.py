"""One start of the syncer, open to close: lock, tape, channel, store, server thread, Trainer."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from dd_lightning.crash_points import reach
from dd_lightning.protocol.actions import Done
from dd_lightning.protocol.messages import PROTOCOL_VERSION
from dd_lightning.protocol.syncer_core import SyncerCore
from dd_lightning.protocol.tape import SCHEMA, TapeError, TapeWriter, read_tape
from dd_lightning.syncer.checkpoint import (
    SyncerCheckpoint,
    checkpoints,
    newest_checkpoint,
    parameters_sha256,
    read_checkpoint,
)
from dd_lightning.syncer.checkpoint_io import AtomicCheckpointIO
from dd_lightning.syncer.checkpoint_writer import CheckpointWriter
from dd_lightning.syncer.cuts import adopt, clean, read_cut
from dd_lightning.syncer.lock import RunLock
from dd_lightning.syncer.module import SyncerModule
from dd_lightning.syncer.payload import encode_values
from dd_lightning.syncer.run_files import Started, read_ports, read_started, write_ports
from dd_lightning.syncer.server import SyncerServer
from dd_lightning.syncer.settings import TAPE, SyncerSettings, check_listen, with_run_id
from dd_lightning.syncer.stream import STREAM_WAIT_S, RoundStream
from dd_lightning.syncer.telemetry import TapeFeed, package_versions, without_paths
from dd_lightning.syncer.trainer import make_trainer
from dd_lightning.transport.rendezvous import StoreServer, serve_store
from dd_lightning.transport.syncer_channel import SyncerChannel

if TYPE_CHECKING:
    from dd_lightning.report.run_log import RunLog

log = logging.getLogger(__name__)

CLOSE_LOGS_S = 15.0  # at the end of a run, for all loggers together to write what is queued
CLOSE_LOGS_STOPPED_S = 1.0  # when the run was told to end: within `timeouts.shutdown`
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Signals(Callback):
    """SIGINT and SIGTERM ask the server to end; Lightning alone would end `fit` at once."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        """Take the signals."""
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._install()

    def __exit__(self, *error: object) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning has put its own handlers in by now."""
        self._install()

    def _handle(self, number: int, frame: Any) -> None:
        self._stop(signal.Signals(number).name)


class SyncerRun:
    """Holds what one start has open.

    Raises:
        ValueError: another syncer runs this run, or the checkpoint does not fit the settings.
    """

    def __init__(self, settings: SyncerSettings, close: contextlib.ExitStack) -> None:
        self._settings = settings
        self._folder = settings.run_dir / "syncer"
        self.lock = RunLock(self._folder)
        close.callback(self.lock.release)
        self._restored = self._read_restored()
        self._began = self._begin()
        self.config = with_run_id(settings.config, self._began.run_id)
        self._channel, self._store = self._listen(close)  # before anything of a run is written
        self._start_clock()
        self._feed = self._open_tape(close)
        if self._unsaid:
            self._feed.warn(self._unsaid, self.clock())
        self.core = SyncerCore(
            self.config,
            run_id=self.config.run_id,
            epoch=self.lock.epoch,
            restored=self._restored.state["core"] if self._restored else None,
            resumed=settings.resume,
            whole=settings.cut is not None,
        )
        self.core.cuts.number = clean(self._folder)
        self._stream = self._make_stream()
        self._module = self._restored_module()
        self.server = self._make_server(
            self.core, self._channel, self._stream, self._feed, self.clock, self._folder,
            self._restored_payloads(),
        )  # fmt: skip
        self._signals = _Signals(self.server.request_stop)

    @property
    def address(self) -> str:
        """Where learners find the run."""
        return self._store.address

    def clock(self) -> float:
        """Seconds since the run's start, over all its epochs."""
        return self._clock_offset_s + time.monotonic() - self._started_s

    def resumed(self) -> dict[str, Any]:
        """What this start goes on from, as plain values; empty for a run's first start."""
        if not self._settings.resume:
            return {}
        run = self.core.run
        return {
            "checkpoint": self._restored.path.name if self._restored else None,
            "epoch": run.epoch,
            "merges": run.merges,
            "tokens_merged": run.tokens_merged,
            "versions": [list(version) for version in run.versions],
            "clock": run.clock.value,
            "seconds": self._clock_offset_s,
        }

    def execute(self, announce: Callable[[], None] = lambda: None) -> Done:
        """Serve until the run is over; write its end. Errors of either thread are raised.

        Args:
            announce: called once a signal ends the run in order: who hears of it may send one.
        """
        status = "failed"
        try:
            with self._take_signals():
                announce()
                self.server.start()
                self._train()
            if self.server.error is not None:
                raise self.server.error
            assert self.server.outcome is not None  # the thread has ended without an error
            status = self.server.outcome.status
            return self.server.outcome
        finally:
            self._write_end(status)

    def _train(self) -> None:
        """`Trainer.fit` from the moment Θ is known until the server thread has ended."""
        timeout_s = self.config.timeouts.shutdown
        try:
            self._await_ready()
            if self.core.run.initialized and self.server.error is None:
                self._fit()
        except Exception as error:
            self.server.abort(error)
            # what the server ended the stream with is its own to report
            outcome = self.server.outcome if self.server.join(timeout_s) else None
            if outcome is None or outcome.status == "failed":
                raise
        if not self.server.join(timeout_s):
            raise TimeoutError(f"the server thread has not ended in {timeout_s} s")

    def _fit(self) -> None:
        if self._module is None:
            self._module = self._fresh_module()
        writer = CheckpointWriter(
            self._folder,
            self.config.checkpoint_keep,
            self.lock.check,
            self.server.deliver,
            self._feed.sync,  # no checkpoint that is newer than the tape on the disk
        )
        trainer = make_trainer(self._folder, [*self._callbacks(), writer], self.checkpoint_io)
        path = str(self._restored.path) if self._restored else None
        trainer.fit(self._module, self._stream, ckpt_path=path, weights_only=True)

    # ------------------------------------------------------------------ replaced in virtual time

    checkpoint_io: Callable[[], AtomicCheckpointIO] = AtomicCheckpointIO
    _close_logs_s = CLOSE_LOGS_S

    def _make_stream(self) -> RoundStream:
        return RoundStream(self.config.algorithm.fragments + 2)

    def _make_server(self, *arguments: Any) -> SyncerServer:
        return SyncerServer(*arguments)

    def _take_signals(self) -> contextlib.AbstractContextManager[Any]:
        return self._signals

    def _callbacks(self) -> list[Callback]:
        return [self._signals]

    def _await_ready(self) -> None:
        while not self.server.ready.wait(STREAM_WAIT_S):
            pass  # bounded, so that signals are seen; the server watches its own timeouts

    # ------------------------------------------------------------------ Θ

    def _fresh_module(self) -> SyncerModule:
        layout = self.core.run.layout
        assert layout is not None  # Θ is known, so it is
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        values: dict[str, Any] = {}
        for published in self.server.published.values():
            values |= published.tensors(shapes)
        versions = [(self.lock.epoch, 0)] * layout.num_fragments
        return SyncerModule(
            layout, values, self.config, versions, self.server.deliver, self._keep_versions
        )

    def _read_restored(self) -> SyncerCheckpoint | None:
        if not self._settings.resume:
            return None
        if self._settings.cut is not None:
            restored = read_cut(self._folder, self._settings.cut)
            adopt(self._folder, restored, self.lock.epoch)
            return restored
        path = newest_checkpoint(self._folder, verify=True)
        if path is None and not checkpoints(self._folder):
            return None  # the syncer ended before its first: the run starts over
        if path is None:
            raise ValueError(
                f"--run-dir is {str(self._settings.run_dir)!r}; allowed: with --resume, a run with "
                "a whole checkpoint. All that are there are torn."
            )
        return read_checkpoint(path)

    def _restored_module(self) -> SyncerModule | None:
        if self._restored is None:
            return None
        return SyncerModule(
            self._restored.layout,
            self._restored.values,
            self.config,
            self.core.run.versions,
            lambda merged: self.server.deliver(merged),
            self._keep_versions,
        )

    def _restored_payloads(self) -> dict[int, Any]:
        if self._restored is None:
            return {}
        values = self._restored.values
        return {
            index: encode_values({name: values[name] for name in names})
            for index, names in enumerate(self._restored.layout.fragments)
        }

    def _keep_versions(self) -> bool:
        return self.server.keep_versions

    # ------------------------------------------------------------------ clock, tape, ports

    def _begin(self) -> Started:
        """The run's id and beginning: a later start takes those of the first, so that learners
        that go on belong to it even where no checkpoint was written yet."""
        began = read_started(self._folder) if self._settings.resume else None
        if began is None:
            restored = self._restored.state["run_id"] if self._restored else ""
            run_id = restored or self._settings.config.run_id or uuid.uuid4().hex[:12]
            began = Started.now(run_id)
            began.write(self._folder)
        reach("start.begun")
        return began

    def _start_clock(self) -> None:
        """A resumed run's clock goes on: by the wall clock, and never back behind its tape."""
        self._started_s = time.monotonic()
        self._clock_offset_s = 0.0
        tape = self._settings.run_dir / TAPE
        if not self._settings.resume or not tape.exists():
            return
        last_s = 0.0
        for event in read_tape(tape):  # may hold months: nothing is kept
            last_s = event["t_s"]
        self._clock_offset_s = max(time.time() - self._began.wall_s, last_s)

    def _open_tape(self, close: contextlib.ExitStack) -> TapeFeed:
        described = self._described()
        self._logs = self._open_logs(described)
        close.callback(self._close_logs)
        tape = TapeWriter(self._settings.run_dir / TAPE)
        close.callback(_close, tape)
        feed = TapeFeed(tape, [log.event for log in self._logs])
        if tape.is_new:
            fields = {"schema": SCHEMA, "config": described, "seed": self.config.seed}
            feed.write("run", 0.0, fields | {"versions": package_versions()})
        reach("start.tape_opened")
        return feed

    def _open_logs(self, described: Mapping[str, Any]) -> list[RunLog]:
        if not self._settings.loggers:
            return []
        from dd_lightning.report.loggers import open_logs

        tape, began_s = self._settings.run_dir / TAPE, self.clock()

        def past() -> Iterator[Mapping[str, Any]]:
            """What earlier starts wrote; those of this start go to the logs as they are made."""
            if self._settings.resume and tape.exists():
                yield from (event for event in read_tape(tape) if event["t_s"] < began_s)

        return open_logs(
            self._settings.loggers,
            self.config.run_id,
            self._settings.run_dir,
            described,
            self._began.wall_s,
            past,
        )

    def _close_logs(self) -> None:
        if self._logs:
            from dd_lightning.report.loggers import close_logs

            close_logs(self._logs, self._close_logs_s)

    def _described(self) -> Mapping[str, Any]:
        """The launcher's configuration where there is one, else ours."""
        file = self._settings.run_dir / "config.yaml"
        found = yaml.safe_load(file.read_text()) if file.is_file() else None
        if not isinstance(found, dict):
            found = {"mode": "processes", **self.config.to_dict(), "run_id": ""}
        return without_paths(found)

    def _listen(self, close: contextlib.ExitStack) -> tuple[SyncerChannel, StoreServer]:
        """Bind; a resumed syncer takes its old ports, so that learners find it again."""
        config, keys = self.config, self._settings.keys
        may_be_open = config.insecure or keys is not None
        host, port = check_listen(self._settings.listen, may_be_open)
        old = read_ports(self._folder) if self._settings.resume else {}
        channel = SyncerChannel(
            host,
            old.get("channel", 0),
            max_message_bytes=config.max_message_mib << 20,
            insecure=config.insecure,
            keys=keys,
        )
        close.callback(channel.close)
        reach("start.channel_bound")
        values = {
            "dd/protocol": str(PROTOCOL_VERSION),
            "dd/run_id": config.run_id,
            "dd/channel_port": str(channel.port),
            "dd/key_fingerprint": keys.fingerprint if keys is not None else "",
            "dd/advertise": config.advertise or "",
        }
        listen = f"tcp://{host}:{port or old.get('store', 0)}"
        # plain by nature: it tells where the channel is, and nothing in it is trusted
        store = serve_store(listen, values, insecure=may_be_open)
        close.callback(store.close)
        reach("start.store_serves")
        ports = {"store": int(store.address.rpartition(":")[2]), "channel": channel.port,
                 "address": store.address}  # fmt: skip
        self._unsaid = write_ports(self._folder, ports)
        reach("start.ports_written")
        return channel, store

    def _write_end(self, status: str) -> None:
        """The server thread has ended (or is lost): this thread is the tape's writer now."""
        digest = None
        if self._module is not None:
            digest = parameters_sha256(dict(self._module.theta.named_parameters()))
        now = self.clock()
        for one in self._logs:
            if one.failure is not None:
                self._feed.warn(f"logger {one.name} lacks the rest of the run: {one.failure}", now)
        if status == "interrupted":
            self._close_logs_s = CLOSE_LOGS_STOPPED_S
        reach("end.before_run_end")
        self._feed.write(
            "run_end", now, {"status": status, "parameters_sha256": digest, "seconds": now}
        )
        self._feed.finish(self.config.timeouts.shutdown)
        reach("end.run_end_written")


def _close(tape: TapeWriter) -> None:
    try:
        tape.close()
    except TapeError as error:  # the end of the run has said so too, and failed by it
        log.error("%s", error)
