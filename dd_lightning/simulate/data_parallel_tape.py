"""The tape of a data-parallel run: members, steps, bytes and tokens in the words of every run.

Time stepping is what a member computes; waiting for the slowest, the all-reduce and standing still
are not. A new group of members (after a failure) is a new incarnation of each.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dd_lightning.protocol.tape import SCHEMA, TapeWriter
from dd_lightning.simulate.data_parallel_time import Step

STATS_EVERY_S = 2.0  # of virtual time, as a syncer writes them
LAST_LOSSES = 20
STRATEGY = "DataParallelStep"
TRAINING, PAUSED = "training", "paused"


@dataclass(slots=True)
class _Lane:
    """One member over all its lives."""

    generation: int = 0
    group: int = 0  # number of its incarnation
    state: str = ""
    steps: int = 0
    stepping_s: float = 0.0  # of this incarnation, as `odometer`
    odometer: int = 0
    sent: int = 0  # of this generation, as `received`
    received: int = 0
    merged: int = 0  # tokens that are in the parameters
    lost: int = 0
    batches: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_LOSSES))

    def renew(self) -> None:
        """A new incarnation begins with its next step."""
        self.group += 1
        self.state, self.stepping_s, self.odometer = "", 0.0, 0

    def share(self, share: float) -> float | None:
        """A quantile of the durations of its steps, s."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class JobTape:
    """Writes the tape of one run; a `Witness` of its course.

    Args:
        micro_batches: per step and member.
    """

    def __init__(self, writer: TapeWriter, members: int, micro_batches: int) -> None:
        self._writer, self._micro_batches = writer, micro_batches
        self._lanes = [_Lane() for _ in range(members)]
        self._unsafe: list[Mapping[int, int]] = []  # tokens of the steps since the last checkpoint
        self._stats_s = 0.0
        self._last_s = 0.0

    # ------------------------------------------------------------------ the run

    def run(self, config: Mapping[str, Any], seed: int, versions: Mapping[str, str]) -> None:
        """The first row."""
        self._writer.write("run", 0.0, schema=SCHEMA, config=config, seed=seed, versions=versions)

    def layout(self, names: Sequence[str], num_elements: int, fingerprint: str) -> None:
        """What is trained, as one fragment."""
        self._writer.write(
            "layout",
            0.0,
            fragments=[list(names)],
            averaged=list(names),
            elements=[num_elements],
            fingerprint=fingerprint,
        )

    def warn(self, text: str, now: float) -> None:
        """A warning for the report."""
        self._writer.write("warning", now, text=text)

    def checkpoint(self, now: float, step: int, file: str) -> None:
        """The state of this step is on disk."""
        self._unsafe.clear()
        self._write("checkpoint", now, epoch=0, file=file, step=step, tokens_merged=self.tokens)

    @property
    def tokens(self) -> int:
        """Tokens that are in the parameters."""
        return sum(lane.merged for lane in self._lanes)

    def end(self, now: float, digest: str | None, status: str, faults: Sequence[Any]) -> None:
        """The rest of the tape, but for evaluations."""
        for member, lane in enumerate(self._lanes):
            if lane.state and status == "finished":
                self._state(member, now, "finishing")
            self._stats(member, now)
            if lane.state:
                self._row("leave", member, now, cause=status)
            account = {"processed": lane.merged + lane.lost, "merged": lane.merged,
                       "lost": lane.lost, "pending": 0}  # fmt: skip
            self._write("ledger", now, learner=str(member), fragments=[account])
        for row in faults:
            self._writer.write("fault", **row)
        self._write("run_end", now, status=status, parameters_sha256=digest, seconds=now)

    # ------------------------------------------------------------------ a Witness

    def joined(self, member: int, now: float, state_from: str, step: int) -> None:
        """A process of this member begins."""
        lane = self._lanes[member]
        lane.generation += 1
        lane.sent = lane.received = 0
        lane.renew()
        lane.steps = step
        self._row(
            "join",
            member,
            now,
            cause="new" if lane.generation == 1 else "returned",
            continues=False,
            state_from=state_from,
            state_step=step,
            data_position=lane.batches,
            planned=True,
            strategy=STRATEGY,
            ranks=1,
        )

    def died(self, member: int, now: float, cause: str) -> None:
        """It is known lost."""
        self._stats(member, now)
        self._row("dead", member, now, cause=cause)
        self._lanes[member].state = ""

    def stands(self, members: Sequence[int], now: float) -> None:
        """These stand still."""
        for member in members:
            if self._lanes[member].state == TRAINING:
                self._stats(member, now)
                self._state(member, now, PAUSED)

    def goes_on(self, members: Sequence[int]) -> None:
        """A new group: a new incarnation of each that had stepped in the one before."""
        for member in members:
            if self._lanes[member].state:
                self._lanes[member].renew()

    def sent(self, wire: Mapping[int, tuple[int, int]]) -> None:
        """Bytes of an all-reduce, whole or broken off."""
        for member, (sent, received) in wire.items():
            self._lanes[member].sent += sent
            self._lanes[member].received += received

    # ------------------------------------------------------------------ steps

    def stepped(self, step: Step, tokens: Mapping[int, int], losses: Mapping[int, float]) -> None:
        """All of `step.members` have made it."""
        for member in step.members:
            lane = self._lanes[member]
            if lane.state != TRAINING:
                self._state(member, step.began_s, TRAINING, first_step_started_s=step.began_s)
        for member in step.members:
            lane = self._lanes[member]
            lane.steps = step.number
            lane.stepping_s += step.compute_s[member]
            lane.seconds.append(step.compute_s[member])
            lane.odometer += tokens[member]
            lane.merged += tokens[member]
            lane.batches += self._micro_batches
            lane.losses.append(losses[member])
        self._unsafe.append(tokens)
        self._write(
            "all_reduce",
            step.ended_s,
            step=step.number,
            members=[str(member) for member in step.members],
            tokens=[tokens[member] for member in step.members],
            compute_s=max(step.compute_s.values()),
            reduce_s=step.reduce_s,
            loss=fmean(losses.values()),
        )
        if step.ended_s >= self._stats_s + STATS_EVERY_S:
            self._stats_s = step.ended_s
            for member in step.members:
                self._stats(member, step.ended_s)

    def rewound(self, now: float, step: int) -> None:
        """All go back to the checkpoint of `step`: what was done since is lost."""
        lost: Counter[int] = Counter()
        for tokens in self._unsafe:
            for member, count in tokens.items():
                self._lanes[member].batches -= self._micro_batches
                lost[member] += count
        self._write("rewind", now, step=step, steps_lost=len(self._unsafe), cause="member lost")
        self._unsafe.clear()
        for member, count in sorted(lost.items()):
            lane = self._lanes[member]
            lane.merged -= count
            lane.lost += count
            self._row("lost", member, now, fragment=0, tokens=count, cause="rewind")

    # ------------------------------------------------------------------ rows

    def _write(self, event: str, now: float, **fields: Any) -> None:
        self._last_s = max(self._last_s, now)
        self._writer.write(event, now, **fields)

    def _row(self, event: str, member: int, now: float, **fields: Any) -> None:
        lane = self._lanes[member]
        known = {"generation": lane.generation, "incarnation": f"{member}.{lane.group}"}
        self._write(event, now, learner=str(member), **known, **fields)

    def _state(self, member: int, now: float, state: str, **fields: Any) -> None:
        lane = self._lanes[member]
        lane.state = state
        self._row("state", member, now, state=state, step=lane.steps, **fields)

    def _stats(self, member: int, now: float) -> None:
        lane = self._lanes[member]
        if not lane.state:
            return
        self._row(
            "learner_stats",
            member,
            now,
            step=lane.steps,
            odometer=lane.odometer,
            seconds_stepping=lane.stepping_s,
            bytes_up=lane.sent,
            bytes_down=lane.received,
            step_seconds_p50=lane.share(0.5),
            step_seconds_p99=lane.share(0.99),
            loss=fmean(lane.losses) if lane.losses else None,
        )
