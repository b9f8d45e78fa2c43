"""Consistent cuts of a fleet in virtual time, and the restore of the whole fleet from one."""

from __future__ import annotations

import copy
from typing import Any

from msgspec.structs import replace

from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.actions import CutDone, CutFailed
from dd_lightning.protocol.cut_record import held_in, own_clock, record_cut, restore_cut
from dd_lightning.protocol.syncer_core import SyncerCore


class FleetCuts:
    """What the disks of the fleet hold of its cuts."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.parts: dict[tuple[str, str], dict] = {}  # (cut, learner) to its file
        self.syncer: dict[str, dict] = {}  # cut to the syncer's file
        self.done: dict[str, CutDone] = {}
        self.failed: dict[str, CutFailed] = {}
        self.restores = 0
        self.write_s = 0.0  # how long a learner's file takes

    # ------------------------------------------------------------------ a learner's side

    def ordered(self, life: Any, now: float) -> None:
        """A repeated order: what was said is said again."""
        if life.recorded is not None and life.recorded.cut == life.order.cut:
            life.link.say(life.recorded)
            if (life.order.cut, life.name) in self.parts:
                self._say_taken(life, life.order.cut, now)

    def batch_ends(self, life: Any, now: float) -> None:
        """The moment at which a learner may record: after a step and its boundary."""
        order, ledger = life.order, life.ledger
        if order is None or life.steps == 0:
            return
        if life.recorded is not None and life.recorded.cut == order.cut:
            return
        if order.at_clock is not None and own_clock(ledger) < order.at_clock:
            return
        record = record_cut(ledger, order.cut)
        part = {
            "cut": order.cut,
            "incarnation": life.incarnation,
            "ledger": copy.deepcopy(record),
            "theta": [tensor.clone() for tensor in life.toy.theta],
            "steps": life.steps,
        }
        life.recorded = msg.CutRecorded(
            generation=0, cut=order.cut, step=ledger.step, odometer=ledger.odometer
        )
        life.link.say(life.recorded)
        self.fleet.at(now + self.write_s, lambda t: self._written(life, order.cut, part, t))

    def _written(self, life: Any, cut: str, part: dict, now: float) -> None:
        if life.alive:
            self.parts[cut, life.name] = part
            self._say_taken(life, cut, now)

    def _say_taken(self, life: Any, cut: str, now: float) -> None:
        life.link.say(msg.CutTaken(generation=0, cut=cut, file=f"{life.name}/{cut}.ckpt"))
        life.pump(now)

    def join_of(self, life: Any, join: msg.Join) -> msg.Join:
        """The first join of a process restored from its part."""
        held = held_in(life.part["ledger"])
        for mine, saved in zip(life.toy.theta, life.part["theta"], strict=True):
            mine.copy_(saved)
        life.step0, life.steps = held["step"], life.part["steps"]
        return replace(
            join, cut=life.part["cut"], former=life.part["incarnation"],
            state_from="checkpoint", **held,
        )  # fmt: skip

    def resume(self, life: Any, welcome: msg.Welcome) -> None:
        """Welcomed as part of the whole."""
        restore_cut(life.ledger, copy.deepcopy(life.part["ledger"]), welcome)

    def carry_over(self) -> None:
        """What the oracle saw merged of an incarnation is now that of who carries its part on."""
        intervals = self.fleet.intervals
        for life in self.fleet.current.values():
            if life.part is None or life.incarnation not in self.fleet.core.run.accounts:
                continue
            former = life.part["incarnation"]
            if former not in self.fleet.core.run.accounts:
                for incarnation, p in [key for key in intervals if key[0] == former]:
                    intervals[life.incarnation, p] = intervals.pop((incarnation, p))

    # ------------------------------------------------------------------ the syncer's side

    def write(self, state: dict, now: float) -> None:
        """Its record is on disk at once."""
        fleet, cut = self.fleet, state["cut"]["id"]
        self.syncer[cut] = {
            "state": copy.deepcopy(state),
            "theta": [tensor.clone() for tensor in fleet.theta],
            "buffer": [tensor.clone() for tensor in fleet.buffer],
            "intervals": {key: list(row) for key, row in fleet.intervals.items()},
        }
        fleet.core.cut_saved(cut, now)

    def ended(self, action: CutDone | CutFailed) -> None:
        """Done or failed."""
        (self.done if isinstance(action, CutDone) else self.failed)[action.cut] = action

    def restore(self, cut: str, left_out: tuple[str, ...] = ()) -> None:
        """Everything that runs is killed; the syncer and each learner go on from their files.

        Args:
            left_out: learners that do not come back, unless it is the only one.
        """
        fleet, saved = self.fleet, self.syncer[cut]
        for life in fleet.lives:
            life.alive = False
        fleet.session_of.clear()
        fleet.epoch += 1
        self.restores += 1
        state = copy.deepcopy(saved["state"])
        learners = self.done[cut].manifest["learners"]
        state["cut"]["learners"] = {
            name: row for name, row in state["cut"]["learners"].items() if name in learners
        }
        fleet.core = SyncerCore(
            fleet.config, run_id="r", epoch=fleet.epoch, restored=state, whole=True
        )
        fleet.core.cuts.number = len(self.syncer) + len(self.failed)
        fleet.load(saved)
        fleet.checked.clear()
        fleet.syncer_up = True
        for name in sorted(learners):
            if name not in left_out or len(learners) == 1:
                back_s = fleet.now + fleet.random.uniform(0, 5)
                part = self.parts[cut, name]
                fleet.at(back_s, lambda t, n=name, p=part: fleet.start(n, t, part=p))
