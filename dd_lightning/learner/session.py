"""One learner's stay in a run, as its training thread sees it: join, load, step, hand in, leave.

Knows nothing of Lightning. Nothing in a step waits, except under `wait: overlap`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dd_lightning.crash_points import reach
from dd_lightning.learner.comm import CommThread, Delivery
from dd_lightning.learner.cut_orders import CutOrders, warn_of_another_state
from dd_lightning.learner.global_weights import GlobalWeights
from dd_lightning.learner.inner_state import InnerState
from dd_lightning.learner.own_checkpoint import STATE_VERSION
from dd_lightning.learner.recovery import InnerExchange
from dd_lightning.learner.rng import rng_states
from dd_lightning.learner.snapshots import ModelValues
from dd_lightning.learner.state_copy import StateCopies
from dd_lightning.learner.step_clock import StepClock
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.cut_record import own_clock, record_cut, restore_cut
from dd_lightning.protocol.held import NON_FINITE, Snapshot
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.ledger import LearnerLedger, Outgoing
from dd_lightning.protocol.messages import (
    Applied,
    Checkpointed,
    Closed,
    CutOver,
    FinishNow,
    Fragment,
    Join,
    Pull,
    Released,
    SendInitial,
    TakeCut,
    Verdict,
    Welcome,
)

log = logging.getLogger(__name__)

SLICE_S = 0.2  # a wait looks so often whether the process is told to stop


class LearnerSession:
    """Owns the ledger; the comm thread owns the link, which is reached by `comm.call` only.

    Args:
        told_to_stop: whether the process got SIGTERM; ends every wait.
        part: of a consistent cut, as `record_cut` made it, that this process was restored from.
    """

    _exchange_of = InnerExchange

    def __init__(
        self,
        join: Join,
        link: LearnerLink,
        comm: CommThread,
        values: ModelValues,
        told_to_stop: Callable[[], bool] = lambda: False,
        part: Mapping[str, Any] | None = None,
    ) -> None:
        self.cuts = CutOrders(lambda message: comm.call(link.say, message))
        self.clock = StepClock()
        self.copies = StateCopies()  # of parameters and optimizer state, under way
        self.config = SyncerConfig()
        self.welcome: Welcome | None = None
        self.finish_reason = ""  # told to finish, and why
        self.boundary_s: float | None = None  # what the last boundary took, waits not counted
        self.data_position = join.data_position  # micro-batches drawn, over all lives
        self.reset_inner = False  # the inner optimizer is to forget its state
        self._join, self._link, self._comm, self._values = join, link, comm, values
        self.traffic = comm.traffic
        self.weights = GlobalWeights(values, comm.traffic, self._settle_copies)
        self._ledger: LearnerLedger | None = None
        self._inner: InnerExchange | None = None
        self._told_to_stop, self._part = told_to_stop, part
        self._start_step = 0  # of a newcomer's schedule
        self._donated = self._released = self._closed = False  # donated: a peer's state is to come

    # ------------------------------------------------------------------ beginning

    def open(self) -> None:
        """Join. Raises ConnectionError when no syncer was reached in time, or it refused."""
        reach("learner.joining")
        self._comm.start()
        while self._ledger is None:
            self._wait_for_delivery("joining")
        reach("learner.admitted")

    def load(self) -> None:
        """Take over Θ: every fragment once, before the first step. Raises as `open`."""
        assert self._ledger is not None  # open() comes first
        while not self._ledger.loaded:
            self._wait_for_delivery("loading the parameters")
            out = self._boundary()
            if out and not self._ledger.loaded:
                reach("learner.half_loaded")
            self._hand_over(out)
        reach("learner.loaded")
        self._report()

    def exchange(self, state: InnerState) -> int | None:
        """Make the inner optimizer known; wait for a peer's state if one was promised. The donor's
        step, None where none came. Bounded by `timeouts.donor` and the syncer's donors."""
        call, timeout_s = self._comm.call, self.config.timeouts.donor
        inner = self._inner = self._exchange_of(state, self.copies, self._link, call, timeout_s)
        inner.begin(self._donated, self.now())
        while inner.waiting:
            self._wait_for_delivery("waiting for a peer's inner state")
            self._hand_over(self._boundary())
            inner.tick(self.now())
        return inner.donor_step

    def now(self) -> float:
        """Seconds of the session's clock."""
        return self._comm.clock()

    @property
    def is_alone(self) -> bool:
        """One planned learner: data and random numbers are to be those of a plain run."""
        return self.config.learners == 1

    @property
    def steps(self) -> int:
        """Inner steps of the schedule that are done: a newcomer starts at the run's clock."""
        assert self._ledger is not None
        return self._ledger.step + self._start_step

    # ------------------------------------------------------------------ training

    def step(self, tokens: int, loss: float | None) -> None:
        """The boundary after an inner step: apply what has come, answer what was asked."""
        ledger = self._ledger
        assert ledger is not None
        begun = self._comm.clock()
        reach("learner.stepped")
        ledger.stepped(tokens)
        self._drain()
        out = self._boundary()
        now = self._comm.clock()
        seconds = self.clock.end(now)
        waits = ledger.must_wait(now)
        self._hand_over(out)
        self._report("waiting" if waits else "training", seconds, loss)
        self.boundary_s = self._comm.clock() - begun  # its report goes out with the next one
        if waits:
            self._wait_for_round(ledger)
        if self._inner is not None:
            self._inner.boundary(ledger.step)

    def _wait_for_round(self, ledger: LearnerLedger) -> None:
        """`wait: overlap`; bounded by the ledger with `timeouts.round`."""
        self.clock.leave_out(self._comm.clock())
        while ledger.must_wait(self._comm.clock()) and not self._may_go:
            deadline = ledger.wait_deadline or 0.0
            delivery = self._comm.next(min(SLICE_S, max(0.0, deadline - self._comm.clock())))
            if delivery is not None:
                self._take(delivery)
                self._drain()
            self._hand_over(self._boundary())
        self.clock.resume(self._comm.clock())
        self._report("training")

    def before_step(self) -> None:
        """The parameters change next: copies of them that are under way are finished first."""
        self._settle_copies()

    def begin_epoch(self) -> None:
        """Before the first batch: callbacks have frozen and unfrozen what they want by now."""
        self._values.warn_of_unfrozen()

    def poll(self) -> None:
        """After a step that did not count: raise what went wrong, hear what came."""
        self._drain()

    def pause(self) -> None:
        """Validation begins: answer what can be answered, then be left out of rosters."""
        if self._ledger is None or not self._ledger.loaded:
            return
        self.clock.leave_out(self._comm.clock())
        self._drain()
        self._hand_over(self._boundary(unlimited=True))
        self._report("paused")

    def resume(self) -> None:
        """Validation is over; training again from the next finished step."""
        self.clock.resume(self._comm.clock())

    # ------------------------------------------------------------------ end

    def finish(self, reason: str = "done") -> None:
        """Hand in what no merge has yet; bounded by `timeouts.flush`."""
        ledger = self._ledger
        assert ledger is not None
        reach("learner.finished")
        ledger.finish()
        self._drain()
        self._hand_over(self._boundary())
        held = ledger.held(self.data_position)
        self._comm.call(self._link.finish, held, reason, self._comm.clock())
        reach("learner.finish_said")
        deadline = self._comm.clock() + self.config.timeouts.flush
        while not self._may_go:
            left = deadline - self._comm.clock()
            if left <= 0:
                warnings.warn(
                    f"the syncer did not confirm the last contributions within timeouts.flush = "
                    f"{self.config.timeouts.flush:g} s; what was not merged is lost.",
                    stacklevel=2,
                )
                break
            delivery = self._comm.next(min(SLICE_S, left))
            if delivery is not None:
                self._take(delivery)
                self._drain()
            self._hand_over(self._boundary())

    def close(self, reason: str) -> None:
        """Leave: with a reason say goodbye; end the comm thread, within `timeouts.shutdown`."""
        if self._closed:
            return
        self._closed = True
        if reason:
            self._comm.call(self._link.goodbye, reason)
        if not self._comm.stop(self.config.timeouts.shutdown):
            log.warning("the comm thread did not end within timeouts.shutdown")

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Plain values for Lightning's checkpoint."""
        assert self._ledger is not None
        return {
            "version": STATE_VERSION,
            "learner": self._join.learner,
            "run_id": "" if self.welcome is None else self.welcome.run_id,
            "incarnation": self._join.incarnation,
            "data_position": self.data_position,
            "rng": rng_states(),
            **self._ledger.state_dict(),
        }

    @property
    def cut_is_due(self) -> bool:
        """Whether this learner is to record its part of a consistent cut now."""
        order, ledger = self.cuts.order, self._ledger
        due = order is not None and ledger is not None
        return due and (order.at_clock is None or own_clock(ledger) >= order.at_clock)

    def record_cut(self) -> dict[str, Any]:
        """This learner's part of the cut that it was asked for: plain values and tensors."""
        order, ledger = self.cuts.order, self._ledger
        assert order is not None and ledger is not None  # `cut_is_due` was asked before
        record = record_cut(ledger, order.cut)
        self.cuts.recorded(order.cut, ledger.step, ledger.odometer)
        return {"id": order.cut, "ledger": record, "start_step": self._start_step}

    def checkpointed(self) -> None:
        """Lightning has written a checkpoint."""
        assert self._ledger is not None
        said = Checkpointed(0, step=self._ledger.step, data_position=self.data_position)
        self._comm.call(self._link.say, said)

    # ------------------------------------------------------------------ pieces

    def _boundary(self, *, unlimited: bool = False) -> list[Outgoing]:
        """Applies change parameters too; with Θ loaded anew the inner optimizer begins anew."""
        assert self._ledger is not None
        self._settle_copies()
        was_reloading = self._ledger.reloading
        out = self._ledger.boundary(self._comm.clock(), unlimited=unlimited)
        self.reset_inner |= was_reloading and not self._ledger.reloading
        return out

    @property
    def _may_go(self) -> bool:
        return self._released or self._told_to_stop()

    def _settle_copies(self) -> None:
        self.copies.settle()
        if self._inner is not None:
            self._inner.settled()

    def _wait_for_delivery(self, doing: str) -> None:
        """One delivery or one slice of time; how long in all is the link's to bound."""
        if self._told_to_stop():
            raise InterruptedError(f"stopped by a signal while {doing}")
        delivery = self._comm.next(SLICE_S)
        if delivery is not None:
            self._take(delivery)

    def _drain(self) -> None:
        while (delivery := self._comm.next(0.0)) is not None:
            self._take(delivery)

    def _take(self, delivery: Delivery) -> None:
        message, ledger = delivery.message, self._ledger
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif ledger is None:
            return
        elif isinstance(message, Fragment):
            assert delivery.tensors is not None  # decoded by the comm thread
            ledger.on_fragment(message, delivery.tensors)
        elif isinstance(message, Pull):
            ledger.on_pull(message, delivery.arrived_s)
        elif isinstance(message, Closed):
            ledger.on_closed(message.fragment, message.round)
        elif isinstance(message, SendInitial):
            self._send_initial()
        elif isinstance(message, Verdict):
            self._refused(message, ledger)
        elif isinstance(message, FinishNow):
            self.finish_reason = message.reason or "told to finish"
        elif isinstance(message, Released):
            self._released = True
            reach("learner.released")
        elif isinstance(message, TakeCut | CutOver):
            self.cuts.heard(message)
        elif self._inner is not None:
            self._inner.take(message, delivery.payload, self.now())

    def _welcomed(self, welcome: Welcome) -> None:
        if self._ledger is None:
            self.welcome = welcome
            self.config = SyncerConfig.load(welcome.config)
            self._values.place(welcome.fragments)
            self._ledger = LearnerLedger.from_config(
                self._values,
                self.config,
                len(welcome.fragments),
                deltas=self._comm.wants_deltas,
                buffers=self._values.buffers,
                step=self._join.step,
            )
            if self._join.step == 0:
                self._start_step = welcome.start_step
        elif self._inner is not None:
            self._inner.welcomed(welcome)
        self._donated = welcome.donated
        part, self._part = self._part, None
        if part is not None and welcome.cut:
            restore_cut(self._ledger, part["ledger"], welcome)
            self._start_step = part["start_step"]
        else:
            self._ledger.attach(welcome)
            if part is not None:
                warn_of_another_state(part["id"])
        if welcome.reload:
            self._ledger.reload()
        if welcome.send_initial:
            self._send_initial()

    def _send_initial(self) -> None:
        assert self.welcome is not None
        for fragment in range(len(self.welcome.fragments)):
            self._comm.call(self._link.initial, fragment, self._values.read_whole(fragment))

    def _refused(self, verdict: Verdict, ledger: LearnerLedger) -> None:
        text = "round %d: the contribution of fragment %d was refused: %s"
        log.warning(text, verdict.round, verdict.fragment, verdict.reason)
        if verdict.reload:
            ledger.reload()
        elif verdict.reason == NON_FINITE:
            ledger.on_refused(verdict.fragment, (verdict.epoch, verdict.round))

    def _hand_over(self, out: Sequence[Outgoing]) -> None:
        for item in out:
            if isinstance(item, Snapshot):
                reach("learner.snapshot_taken")
            elif isinstance(item, Applied):
                reach("learner.applied")
                self.traffic.applied(item)
            send = self._link.contribute if isinstance(item, Snapshot) else self._link.say
            self._comm.call(send, item)

    def _report(
        self, state: str = "training", seconds: float | None = None, loss: float | None = None
    ) -> None:
        assert self._ledger is not None
        self._comm.call(
            self._link.report,
            self._ledger.held(self.data_position),
            self._comm.clock(),
            state=state,
            step_seconds=seconds,
            seconds_stepping=self.clock.seconds_stepping,
            loss=loss,
            boundary_s=self.boundary_s,
        )
