"""The course of a data-parallel job in virtual time: steps, and what members' failures cost.

A step lasts as long as the slowest member computes, then the ring all-reduce; nobody begins the
next one before. What is lost, by failure:

- A member is killed (noticed at once: its connections close), or stopped or cut off for longer
  than `timeouts.lease` (noticed then). The step in which that happens is lost in any case, and
  made again from the same batches. A shorter stop or cut holds everybody up, and loses nothing.
- Not elastic: everybody stands still until the member is back (`simulate.restart_s` after a kill),
  and all go on from the last checkpoint. Lost: every step since it, which is made once more.
- Elastic: the survivors hold all of the state, so no other step is lost; all of them stand still
  for `downscale_s`, go on without the member, and stand still for `upscale_s` when it comes back.
  A downscale absorbs further failures, and those who are back join together, as in `goodput`.
- Elastic, and nobody survives: as not elastic, but with whoever is back first.
- Another failure while the job stands still is absorbed (not elastic: the member is waited for
  too); the Poisson process stands still. A cut in the middle of an all-reduce acts on the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dd_lightning.chaos.faults import KINDS
from dd_lightning.chaos.injector import proxy_command
from dd_lightning.launch.data_parallel import DataParallel
from dd_lightning.simulate.data_parallel_faults import FaultTimes
from dd_lightning.simulate.data_parallel_ring import Ring, chunks

INFINITY = float("inf")


class JobLost(Exception):
    """No member holds the state any more: all go on from the last checkpoint, which is `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"back to the checkpoint of step {step}")
        self.step = step


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was made by all of `members`.

    Args:
        number: 1 for the first of the run.
        compute_s: what each needed for its own batches.
        reduce_s: of the all-reduce.
    """

    number: int
    members: tuple[int, ...]
    began_s: float
    ended_s: float
    compute_s: Mapping[int, float]
    reduce_s: float


class Witness(Protocol):
    """Who writes down what happens (`data_parallel_tape`)."""

    def joined(self, member: int, now: float, state_from: str, step: int) -> None:
        """A process of this member begins."""

    def died(self, member: int, now: float, cause: str) -> None:
        """It is known lost."""

    def stands(self, members: Sequence[int], now: float) -> None:
        """These stand still."""

    def goes_on(self, members: Sequence[int]) -> None:
        """And step again, in a new group."""

    def sent(self, wire: Mapping[int, tuple[int, int]]) -> None:
        """Bytes sent and received by member."""


@dataclass(frozen=True, slots=True)
class _Effect:
    """What a fault does: the member stops for a while, or is lost from `lost_s` to `back_s`."""

    at_s: float
    member: int
    stops_s: float = 0.0
    lost_s: float = INFINITY
    back_s: float = INFINITY
    cause: str = ""


@dataclass(slots=True)
class Course:
    """Plays step after step.

    Args:
        durations: of each member's own computation, seconds.
        num_elements: of the gradient, float32.
        lease_s, restart_s: `timeouts.lease`, `simulate.restart_s`.
    """

    settings: DataParallel
    durations: Sequence[Iterator[float]]
    ring: Ring
    faults: FaultTimes
    witness: Witness
    num_elements: int
    lease_s: float
    restart_s: float
    now: float = 0.0
    step: int = 0
    saved: int = 0  # step of the last checkpoint
    _away: dict[int, float] = field(default_factory=dict)  # lost members, and when they are back
    _held: dict[int, float] = field(default_factory=dict)  # stopped members, until when
    _slow: dict[int, tuple[float, float]] = field(default_factory=dict)  # until when, factor
    _stepped_s: float = 0.0  # of all steps made
    _made: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        """Those that are there."""
        return tuple(k for k in range(len(self.durations)) if k not in self._away)

    @property
    def step_s(self) -> float:
        """Mean seconds of the steps so far."""
        return self._stepped_s / self._made if self._made else 0.0

    def begin(self, state_from: str) -> None:
        """The job begins, or begins again from `saved`."""
        self.step = self.saved
        self.ring.connect_anew()
        for member in self.members:
            self.witness.joined(member, self.now, state_from, self.step)
        self.faults.back(self.members, self.now)

    def checkpointed(self) -> None:
        """The state of this step is safe."""
        self.saved = self.step
        self.faults.open(self.now, self.step, self.step_s)

    def next_step(self) -> Step:
        """Let time pass until the next step is made.

        Raises:
            JobLost: steps since the last checkpoint are lost.
        """
        self.faults.stepped(self.now, self.step, self.step_s)
        while True:
            self._take_back()
            if (step := self._attempt()) is not None:
                self.now, self.step = step.ended_s, step.number
                self._stepped_s += step.ended_s - step.began_s
                self._made += 1
                return step

    # ------------------------------------------------------------------ one step

    def _attempt(self) -> Step | None:
        """A step; None where a member was lost in it."""
        began, members = self.now, self.members
        compute = {k: next(self.durations[k]) * self._factor(k) for k in members}
        ready = {k: max(began, self._held.get(k, began)) + compute[k] for k in members}
        while self.faults.next_s < max(ready.values()):
            effect = self._effect()
            if effect is None:
                continue
            if effect.lost_s < INFINITY:
                self._lose(effect)
                return None
            held = ready[effect.member] + effect.stops_s  # while it computed, or waited after it
            woken = effect.at_s + effect.stops_s
            done = effect.at_s >= ready[effect.member]
            ready[effect.member] = woken if done else held
        start = max(ready.values())
        sizes = chunks(self.num_elements, len(members))
        reduced = self.ring.all_reduce(start, members, sizes)
        ended = reduced.ended_s
        while self.faults.next_s < ended:
            effect = self._effect()
            if effect is not None and effect.lost_s < INFINITY:
                self.witness.sent(reduced.wire(effect.at_s))
                self._lose(effect)
                return None
            ended += effect.stops_s if effect is not None else 0.0
        self.witness.sent(reduced.wire())
        return Step(self.step + 1, members, began, ended, compute, ended - start)

    def _factor(self, member: int) -> float:
        until_s, factor = self._slow.get(member, (0.0, 1.0))
        return factor if self.now < until_s else 1.0

    def _effect(self) -> _Effect | None:
        """Take the next fault; None where it stops nobody."""
        popped = self.faults.pop(self.step, self.step_s)
        if popped is None:
            return None
        at_s, fault = popped
        at_s, member = max(at_s, self.now), int(fault.target)
        if member in self._away:
            self.faults.missed(fault)
            return None
        if fault.kind == "kill":
            return _Effect(at_s, member, 0.0, at_s, at_s + self.restart_s, "killed")
        if fault.kind == "slow":
            self._slow[member] = (at_s + fault.options["seconds"], fault.options["factor"])
            return None
        seconds = fault.options["seconds"]
        if KINDS[fault.kind].network:
            self.ring.disturb(at_s, member, proxy_command(fault))
        if seconds <= self.lease_s or fault.kind == "bandwidth":
            stops = fault.kind == "pause"
            return _Effect(at_s, member, seconds) if stops else None
        return _Effect(at_s, member, seconds, at_s + self.lease_s, at_s + seconds, "lease")

    # ------------------------------------------------------------------ losses and returns

    def _lose(self, effect: _Effect) -> None:
        self.faults.stood_still(effect.lost_s - effect.at_s)
        self.now = effect.lost_s
        self._strike(effect)
        if self.settings.elastic and self.members:
            self._stand(self.now + self.settings.downscale_s)
        if not self.settings.elastic or not self.members:
            self._restart()
        self._regroup()

    def _regroup(self) -> None:
        self.ring.connect_anew()
        self.witness.goes_on(self.members)

    def _strike(self, effect: _Effect) -> None:
        self.witness.died(effect.member, effect.lost_s, effect.cause)
        back_s = max(effect.back_s, effect.lost_s)
        if effect.cause == "lease" and not self.settings.elastic:
            back_s += self.restart_s  # its process must begin anew, as all others have
        self._away[effect.member] = back_s

    def _stand(self, until: float) -> None:
        """Everybody stands still; failures meanwhile are absorbed."""
        self.witness.stands(self.members, self.now)
        self.faults.stood_still(until - self.now)
        while self.faults.next_s < until:
            effect = self._effect()
            if effect is None:
                continue
            if effect.lost_s < until:
                self._strike(effect)
            else:
                self._held[effect.member] = effect.at_s + effect.stops_s
        self.now = until

    def _take_back(self) -> None:
        back = [member for member, at_s in self._away.items() if at_s <= self.now]
        if not back:
            return
        if self.members:
            self._stand(self.now + self.settings.upscale_s)
        if not self.members:  # the last ones that held the state are lost meanwhile
            self._restart()
        for member in back:
            if self._away.pop(member, None) is not None:
                self.witness.joined(member, self.now, "peer", self.step)
        self.faults.back(self.members, self.now)
        self._regroup()

    def _restart(self) -> None:
        """Wait for the members that are needed, and go back to the last checkpoint."""
        while True:
            if self.settings.elastic:
                until = max(self.now, min(self._away.values()))
            else:  # the others' processes must begin anew too
                until = max(self.now + self.restart_s, *self._away.values())
            self._stand(until)
            if self.settings.elastic or max(self._away.values()) <= until:
                break
        self._away = {member: at_s for member, at_s in self._away.items() if at_s > self.now}
        raise JobLost(self.saved)
