"""The syncer of a simulated run: the real one (`syncer/run.py`) under virtual time and channel.

Its two threads, the server's and Lightning's, are actors. Checkpoints are written at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from dd_lightning.launch.supervision import KILLED_CODE
from dd_lightning.protocol.actions import Done
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.channels import VirtualSyncerChannel
from dd_lightning.simulate.faults import VirtualDisk
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.processes import VirtualProcess
from dd_lightning.simulate.virtual_time import SYNCER_NEXT, VirtualTime
from dd_lightning.syncer.checkpoint_io import AtomicCheckpointIO, InBackground, write_and_tell
from dd_lightning.syncer.checkpoint_writer import NotSaved
from dd_lightning.syncer.command import EXIT_CODES
from dd_lightning.syncer.merger import Merged
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.server import SyncerServer
from dd_lightning.syncer.settings import SyncerSettings
from dd_lightning.syncer.stream import Job, RoundStream
from dd_lightning.syncer.telemetry import StatusFile

JOIN_S = 0.05  # of virtual time: how often one actor looks whether the other has ended


class _WakingEvent(threading.Event):
    """An event whose `set` wakes an actor."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self._actor = actor

    def set(self) -> None:
        """Set it; who waits looks at this instant."""
        super().set()
        if not self._actor.ended:
            self._actor.wake()


class _VirtualStream(RoundStream):
    """Waits for a job by parking Lightning's actor."""

    def __init__(self, capacity: int, actor: Actor) -> None:
        super().__init__(capacity)
        self._actor = actor

    def put(self, job: Job) -> None:
        """Add a job and let it be done at this instant."""
        super().put(job)
        self._actor.wake()

    def end(self) -> None:
        """No more jobs come."""
        super().end()
        self._actor.wake()

    def fail(self, error: BaseException) -> None:
        """Raise `error` out of the loop."""
        super().fail(error)
        self._actor.wake()

    def __iter__(self) -> Iterator[Job]:
        while True:
            while not self.has_news:
                self._actor.park()
            job = self._next()
            if job is None:
                return
            yield job


class _VirtualServer(SyncerServer):
    """Its thread is an actor; merges take no time."""

    def __init__(
        self, *arguments: Any, time: VirtualTime, waiter: Actor, disk: VirtualDisk
    ) -> None:
        super().__init__(*arguments)
        self._status = _Status(disk, self._folder / "status.json", warn=self._feed.warn)
        self._time, self._waiter = time, waiter
        self.actor = Actor("syncer's server", self._run, time, SYNCER_NEXT)
        self._channel.actor = self.actor

    def start(self) -> None:
        """Its first turn comes now."""
        self.actor.start()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended; Lightning's actor parks meanwhile."""
        until = self._time.now + timeout_s
        while not self.actor.ended and self._time.now < until:
            self._waiter.park(min(until, self._time.now + JOIN_S))
        return self.actor.ended

    def deliver(self, result: Any) -> None:
        """Real seconds are not part of a simulated run."""
        if isinstance(result, Merged):
            timeless = dataclasses.replace(result.result, seconds=0.0)
            result = dataclasses.replace(result, result=timeless)
        elif isinstance(result, NotSaved):
            result = _OnVirtualDisk(result.job, result.file, result.error, result.num_bytes)
        super().deliver(result)


class _Status(StatusFile):
    """On the virtual disk."""

    def __init__(self, disk: VirtualDisk, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._disk = disk

    def _put(self, text: str) -> None:
        self._disk.check()
        super()._put(text)


class _OnVirtualDisk(NotSaved):
    """How much is free on the real one is no part of a simulated run."""

    def free_bytes(self, folder: Path) -> int:
        """It was refused because it is full."""
        del folder
        return 0


class _AtOnce(AtomicCheckpointIO):
    """Writes where a real syncer would leave it to a thread."""

    def __init__(self, disk: VirtualDisk) -> None:
        super().__init__()
        self._disk = disk

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write, then tell."""
        if not isinstance(storage_options, InBackground):
            super().save_checkpoint(checkpoint, path, storage_options)
            return

        def before_rename() -> None:
            self._disk.check()
            storage_options.before_rename()

        option = InBackground(before_rename, storage_options.done)
        write_and_tell(dict(checkpoint), Path(path), option)  # it empties what it is given


class VirtualSyncer(SyncerRun, VirtualProcess):
    """One start of the syncer; `start`, and either it ends by itself or it is killed.

    Args:
        life: 1 for the run's first.
        disk: under its checkpoints.
    """

    def __init__(
        self,
        settings: SyncerSettings,
        network: VirtualNetwork,
        life: int = 1,
        disk: VirtualDisk | None = None,
    ) -> None:
        VirtualProcess.__init__(self, "syncer", life)
        self._network, self._time = network, network.time
        self._disk = disk or VirtualDisk()
        self.checkpoint_io = functools.partial(_AtOnce, self._disk)
        self._close = contextlib.ExitStack()
        self.actor = Actor("syncer", self._play, network.time, SYNCER_NEXT)
        self.outcome: Done | None = None
        self._killed = False
        SyncerRun.__init__(self, settings, self._close)
        self.server.ready = _WakingEvent(self.actor)

    def start(self) -> None:
        """Serve from now on."""
        self.actor.start()

    def kill(self) -> None:
        """End it where it stands, as SIGKILL does; files stay as they are."""
        if self.ended:
            return
        self._killed = True
        for actor in (self.actor, self.server.actor):
            actor.kill()
        self._close.close()

    @property
    def ended(self) -> bool:
        """Whether both threads have ended."""
        return self.actor.ended and self.server.actor.ended

    @property
    def error(self) -> BaseException | None:
        """What ended it, if that was an error."""
        return self.actor.error

    def exit_code(self) -> int | None:
        """As the process `dd-lightning syncer` has it."""
        if not self.ended:
            return None
        if self._killed:
            return KILLED_CODE
        return EXIT_CODES["failed" if self.outcome is None else self.outcome.status]

    def terminate(self) -> None:
        """As SIGTERM."""
        self.server.request_stop("SIGTERM")

    def _play(self) -> None:
        try:
            self.outcome = self.execute()
        finally:
            self._close.close()

    # ------------------------------------------------------------------ in place of the real one

    def clock(self) -> float:
        """Virtual seconds since the run's start."""
        return self._time.now

    def _start_clock(self) -> None:
        """Virtual time goes on by itself."""

    def _make_stream(self) -> RoundStream:
        return _VirtualStream(self.config.algorithm.fragments + 2, self.actor)

    def _make_server(self, *arguments: Any) -> SyncerServer:
        return _VirtualServer(*arguments, time=self._time, waiter=self.actor, disk=self._disk)

    def _listen(self, close: contextlib.ExitStack) -> tuple[Any, Any]:
        channel = VirtualSyncerChannel(self._network)
        close.callback(channel.close)
        self._unsaid = ""  # no ports, and nothing of them to warn of
        return channel, None

    def _take_signals(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def _callbacks(self) -> list[Callback]:
        return []

    def _await_ready(self) -> None:
        while not self.server.ready.is_set():
            self.actor.park()

    def _write_end(self, status: str) -> None:
        if not self._killed:  # a killed process writes nothing
            super()._write_end(status)
