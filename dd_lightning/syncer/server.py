"""The server thread: channel events into the core, the core's actions out into the world.

Only this thread touches the core and, until it has ended, the tape. It never waits for a merge:
jobs go to the training thread by the stream, results come back by `deliver`. An error here ends
`Trainer.fit` with it; an error in training (`abort`) lets the learners go and ends this thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from dd_lightning.algorithm import CODECS, resolve
from dd_lightning.crash_points import reach
from dd_lightning.protocol.actions import (
    Action,
    CloseSession,
    CutDone,
    CutFailed,
    Done,
    Merge,
    Record,
    RelayState,
    Send,
    SendFragment,
    SetInitial,
    Warn,
    WriteCheckpoint,
)
from dd_lightning.protocol.messages import (
    Contribution,
    Fragment,
    Initial,
    Join,
    Query,
    StateChunk,
    Welcome,
)
from dd_lightning.protocol.syncer_core import SyncerCore
from dd_lightning.syncer.board import StatusBoard
from dd_lightning.syncer.checkpoint_writer import NotSaved, Saved
from dd_lightning.syncer.cuts import CutDesk, cut_of
from dd_lightning.syncer.merger import Merged
from dd_lightning.syncer.operators import Operators
from dd_lightning.syncer.outgoing import Outgoing
from dd_lightning.syncer.payload import (
    Encoded,
    PayloadError,
    PayloadReader,
    encode_values,
    is_16_bit,
)
from dd_lightning.syncer.stream import RoundStream
from dd_lightning.syncer.telemetry import OddPeers, StatusFile, TapeFeed
from dd_lightning.transport.syncer_channel import (
    Arrival,
    Disconnected,
    Malformed,
    SyncerChannel,
)

log = logging.getLogger(__name__)

LONGEST_POLL_S = 0.25  # a signal's flag is seen within it
SHORTEST_POLL_S = 0.001
FAREWELL_S = 0.5  # after the end, for learners to read it and to close


class SyncerServer:
    """Drives one SyncerCore until it is done.

    Args:
        clock: seconds since the run's start.
        folder: the run's `syncer/`, for status.json.
        published: bytes of every fragment, of a restored core.
    """

    def __init__(
        self,
        core: SyncerCore,
        channel: SyncerChannel,
        stream: RoundStream,
        feed: TapeFeed,
        clock: Callable[[], float],
        folder: Path,
        published: dict[int, Encoded] | None = None,
    ) -> None:
        self.core = core
        self.published = dict(published or {})
        self.ready = threading.Event()  # Θ is known; or this thread has ended
        self.keep_versions = (
            resolve("codec", core.config.algorithm.codec, CODECS).encodes == "delta"
        )
        self.outcome: Done | None = None
        self.error: BaseException | None = None
        self._channel, self._stream, self._feed = channel, stream, feed
        self._outgoing = Outgoing(channel)
        self._clock = clock
        self._folder = folder
        self._status = StatusFile(folder / "status.json", warn=feed.warn)
        self._odd = OddPeers(feed)
        self._board = StatusBoard(
            core.status,
            lambda session: channel.wire_bytes(session),
            lambda: (self._odd.total, self._operators.refused),
            clock(),
        )
        request_cut = partial(SyncerCore.request_cut, core)
        self._operators = Operators(channel, self._board.status, request_cut)
        self._cuts = CutDesk(folder, request_cut, self._operators)
        self._results: SimpleQueue[Merged | Saved | NotSaved | Future] = SimpleQueue()
        self._reader: PayloadReader | None = None
        self._attached: set[str] = set()  # sessions that were welcomed and have not closed
        self._stop_reason: str | None = None
        self._stop_by_s: float | None = None
        self._aborted: BaseException | None = None
        self._checkpoint_due_s, self._saved_merges = 0.0, core.run.merges
        self._thread = threading.Thread(target=self._run, name="syncer-server", daemon=True)

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def deliver(self, result: Merged | Saved | NotSaved | Future) -> None:
        """A job is done (called in the training thread, or in that of a checkpoint)."""
        self._results.put(result)
        self._channel.wake()

    def request_cut(self) -> Future[dict[str, Any]]:
        """A consistent cut of the whole run, from any thread; see `CutDesk.asked`."""
        self.deliver(wanted := Future())
        return wanted

    def request_stop(self, reason: str) -> None:
        """Let everyone go and end; safe in a signal handler, which may interrupt anything."""
        self._stop_reason = self._stop_reason or reason

    def abort(self, error: BaseException) -> None:
        """Training has failed: no job will be done any more."""
        self._aborted = error
        self._channel.wake()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.error = error
            self._stream.fail(error)
        finally:
            self.ready.set()

    def _loop(self) -> None:
        now = self._clock()
        self._ready_if_initialized()
        self._carry_out(now)
        for sentence in self.core.config.cautions():
            log.warning("%s", sentence)
            self._feed.write("warning", now, {"text": sentence})
        while self.outcome is None:
            events = self._channel.poll(self._poll_s(now))
            # One time for all that had arrived by then: checking large payloads takes seconds, in
            # which reports wait unread, and no lease may lapse for that.
            now = self._clock()
            for event in events:
                self._take_event(event, now)
            self._take_results(now)
            self._outgoing.flush()
            self._feed.flush()
            if self._aborted is not None:
                self._give_up("failed", f"training failed: {self._aborted}", now)
                break
            self._stop_if_asked(now)
            self._checkpoint_if_due(now)
            self.core.tick(now)
            self._carry_out(now)
            if self._status.due(now):
                self._write_status(now)
        self._write_status(self._clock())
        self._stream.end()
        self._farewell()

    def _poll_s(self, now: float) -> float:
        deadline = self.core.next_deadline(now)
        wait_s = LONGEST_POLL_S if deadline is None else deadline - self._clock()
        return min(max(wait_s, SHORTEST_POLL_S), LONGEST_POLL_S)

    def _take_event(self, event: Arrival | Disconnected | Malformed, now: float) -> None:
        if isinstance(event, Arrival):
            self._receive(event, now)
        elif isinstance(event, Disconnected):
            self._attached.discard(event.session)
            self._outgoing.forget(event.session)
            self._operators.forget(event.session)
            self.core.disconnected(event.session, now)
        else:
            self._odd.saw(event.peer, event.reason, now)
        self._carry_out(now)

    def _receive(self, arrival: Arrival, now: float) -> None:
        message, payload = arrival.message, None
        if isinstance(message, Query):
            self._operators.asked(arrival.session, message, now)
            return
        joined = arrival.session in self.core.run.sessions
        if not joined and not isinstance(message, Join):
            self._odd.saw(
                self._channel.peer_address(arrival.session),
                f"{type(message).__name__} without having joined",
                now,
            )
            self._channel.odd(arrival.session)
        known = joined and self.core.run.layout is not None
        if isinstance(message, Initial | Contribution) and known:
            try:
                payload = self._payload_reader().decode(
                    message.fragment,
                    message.payload,
                    arrival.payload,
                    whole=isinstance(message, Initial),
                )
            except PayloadError as error:
                if self.core.refuse_payload(arrival.session, message, error.reason, now):
                    log.warning("payload refused: %s", error)
                return
            if any(tensor.dtype.itemsize == 2 for tensor in payload.values()):
                self.keep_versions = True  # some tensors of a model in several dtypes
        if isinstance(message, Join) and is_16_bit(message.dtype):
            self.keep_versions = True
        peer = self._channel.peer_address(arrival.session) if isinstance(message, Join) else ""
        data = arrival.payload if isinstance(message, StateChunk) else payload
        self.core.receive(arrival.session, message, now, data, peer)

    def _payload_reader(self) -> PayloadReader:
        if self._reader is None:
            assert self.core.run.layout is not None  # the callers look
            codec = resolve("codec", self.core.config.algorithm.codec, CODECS)
            self._reader = PayloadReader(self.core.run.layout, codec)
        return self._reader

    def _take_results(self, now: float) -> None:
        while True:
            try:
                result = self._results.get_nowait()
            except Empty:
                return
            if isinstance(result, Merged):
                self.published[result.job.fragment] = result.published
                self.core.merged(result.job, result.result, now)
                reach("merge.booked")
            elif isinstance(result, Future):
                self._cuts.asked(result, now)
            elif isinstance(result, Saved):
                self._saved(result, now)
            else:
                self._not_saved(result, now)
            self._carry_out(now)
            reach("merge.told" if isinstance(result, Merged) else "checkpoint.told")

    def _saved(self, saved: Saved, now: float) -> None:
        state = saved.job.state
        fields = {name: state[name] for name in ("epoch", "tokens_merged", "versions", "merges")}
        self._feed.write("checkpoint", now, fields | {"file": saved.file, "cut": cut_of(saved.job)})
        if cut := cut_of(saved.job):
            return self.core.cut_saved(cut, now)
        self._board.checkpoint = (saved.file, now)
        self._saved_merges = state["merges"]
        self._checkpoint_due_s = now + self.core.config.checkpoint_every_s
        self.core.checkpointed(state, now)

    def _not_saved(self, refused: NotSaved, now: float) -> None:
        if not isinstance(refused.error, OSError):
            raise refused.error  # another syncer has taken over, or a bug
        cut, reason = cut_of(refused.job), refused.reason(self._folder)
        if cut:
            return self.core.cut_saved(cut, now, reason)
        self.core.not_checkpointed(reason, now)

    def _checkpoint_if_due(self, now: float) -> None:
        if now >= self._checkpoint_due_s and self.core.run.merges > self._saved_merges:
            self._checkpoint_due_s = now + self.core.config.checkpoint_every_s
            self.core.request_checkpoint(now)

    # ------------------------------------------------------------------ ends

    def _stop_if_asked(self, now: float) -> None:
        timeout_s = self.core.config.timeouts.shutdown
        if self._stop_reason is not None and self._stop_by_s is None:
            self._stop_by_s = now + timeout_s
            self.core.stop(self._stop_reason, now)
        elif self._stop_by_s is not None and now >= self._stop_by_s:
            log.error("the last checkpoint is not written %g s (timeouts.shutdown) after the stop; "
                      "the one before it stands", timeout_s)  # fmt: skip
            self._give_up("interrupted", f"{self._stop_reason}, without a last checkpoint", now)

    def _give_up(self, status: str, reason: str, now: float) -> None:
        """Let the learners go without any more jobs."""
        self.core.stop(reason, now)
        for action in self.core.take():
            if not isinstance(action, Merge | WriteCheckpoint | Done):
                self._act(action, now)
        run = self.core.run
        for learner in sorted({account.learner for account in run.accounts.values()}):
            self._feed.write("ledger", now, {"learner": learner, "fragments": run.ledger(learner)})
        self.outcome = Done(status, reason)
        self._stream.fail(RuntimeError(reason))

    def _farewell(self) -> None:
        """Let the last messages leave: closing the channel drops what has not."""
        until_s = self._clock() + FAREWELL_S
        while self._attached and (left_s := until_s - self._clock()) > 0:
            for event in self._channel.poll(left_s):
                if isinstance(event, Disconnected):
                    self._attached.discard(event.session)

    # ------------------------------------------------------------------ actions out

    def _carry_out(self, now: float) -> None:
        while actions := self.core.take():
            for action in actions:
                self._act(action, now)

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Send(session, message):
                if isinstance(message, Welcome):
                    reach("join.admitted")
                    self._board.attached(message.learner, message.generation, session)
                    self._attached.add(session)
                    self._channel.trust(session)
                self._channel.send(session, message)
            case SendFragment():
                self._send_fragment(action)
            case RelayState(session, message, payload):
                self._outgoing.relay(session, message, payload)
            case Merge() | WriteCheckpoint():
                if isinstance(action, WriteCheckpoint) and _is_last(action):
                    reach("end.before_last_checkpoint")
                self._stream.put(action)
            case SetInitial(fragment, payload, _):
                self.published[fragment] = encode_values(payload)
                reach("initial.received")
                self.core.initialized(fragment, now)
                self._ready_if_initialized()
            case Record(event, fields):
                self._record(event, fields, now)
            case CloseSession(session):
                self._channel.close_session(session)
            case Warn(text):
                log.warning("%s", text)
            case CutDone() | CutFailed():
                self._cuts.ended(action)
            case Done():
                reach("end.done")
                self.outcome = action

    def _ready_if_initialized(self) -> None:
        if self.core.run.initialized:
            self.ready.set()

    def _send_fragment(self, action: SendFragment) -> None:
        published = self.published[action.fragment]
        message = Fragment(
            generation=action.generation,
            fragment=action.fragment,
            version=action.version,
            round=action.round,
            merged_upto=action.merged_upto,
            payload=published.payload,
        )
        self._outgoing.put(action.session, message, published)

    def _record(self, event: str, fields: dict, now: float) -> None:
        if event == "learner_stats":
            up, down = self._board.bytes_of(fields["learner"], fields["generation"])
            fields = fields | {"bytes_up": up, "bytes_down": down}
        self._feed.write(event, now, fields)

    def _write_status(self, now: float) -> None:
        ended = {} if self.outcome is None else {"state": self.outcome.status}
        self._status.write(self._board.status(now) | ended, now)


def _is_last(job: WriteCheckpoint) -> bool:
    """Nobody trains any more: learners are released on this one."""
    return job.state["merges"] > 0 and job.state["training"] == 0
