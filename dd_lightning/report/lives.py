"""Who lived when: incarnations of learners, their steps, bytes and times, from a tape.

All times are the syncer's clock, in seconds since the run's start. The window runs from the first
learner's first inner step (its start) to the last learner's last; `design.md` defines the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dd_lightning.report.observer import Event, Observer, finite

MEASURED = (
    "step_seconds_p50",
    "step_seconds_p99",
    "rtt_ms_p50",
    "rho",
    "boundary_ms_p50",
    "boundary_ms_p99",
)


@dataclass(slots=True)
class Incarnation:
    """One process life of a learner. Without a finished step, `first_step_s` is None."""

    first_step_s: float | None = None  # when its first step began
    last_step: int = 0  # the learner's own count, which a rejoined learner continues
    last_step_s: float | None = None  # the earliest time at which the tape knows `last_step`
    last_sign_s: float = 0.0
    seconds_stepping: float = 0.0
    odometer: int = 0  # tokens
    finished: bool = False


@dataclass(slots=True)
class Life:
    """What the tape knows of one learner, over all its incarnations and generations."""

    joins: int = 0
    first_join_s: float | None = None
    planned: bool = True
    strategy: str = "unknown"
    ranks: int = 1
    steps_unreported_max: int = 0
    loss: float | None = None  # mean of its last 20 steps
    measured: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(MEASURED))
    incarnations: dict[str, Incarnation] = field(default_factory=dict)
    by_generation: dict[tuple[int, int], str] = field(default_factory=dict)
    wire: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def stepped(self) -> list[Incarnation]:
        """Incarnations that finished a step, in order."""
        return [one for one in self.incarnations.values() if one.first_step_s is not None]

    @property
    def steps(self) -> int:
        """Inner steps done: the count of the last incarnation that stepped.

        Steps that a restart from a checkpoint repeats count once, as in Lightning's own counter.
        """
        return self.stepped[-1].last_step if self.stepped else 0

    @property
    def odometer(self) -> int:
        """Tokens processed, over all incarnations."""
        return sum(one.odometer for one in self.incarnations.values())

    @property
    def seconds_stepping(self) -> float:
        """Sum over inner steps, over all incarnations."""
        return sum(one.seconds_stepping for one in self.incarnations.values())

    @property
    def bytes_up(self) -> int:
        """Bytes on the wire from this learner to the syncer, over all its connections."""
        return sum(up for up, _ in self.wire.values())

    @property
    def bytes_down(self) -> int:
        """Bytes on the wire from the syncer to this learner, over all its connections."""
        return sum(down for _, down in self.wire.values())


class Lives(Observer):
    """Follows every learner of a run."""

    def __init__(self) -> None:
        self.learners: dict[str, Life] = {}
        self._epoch = 0

    def life(self, event: Event) -> Life:
        """The learner that `event` speaks of."""
        return self.learners.setdefault(str(event["learner"]), Life())

    def _incarnation(self, event: Event) -> Incarnation:
        life = self.life(event)
        generation = (self._epoch, event["generation"])
        name = event.get("incarnation") or life.by_generation.get(generation)
        if name is None:  # a tape that begins in the middle, or says nothing of incarnations
            name = next(reversed(life.incarnations), f"generation {event['generation']}")
        life.by_generation.setdefault(generation, str(name))
        return life.incarnations.setdefault(str(name), Incarnation())

    def _sign(self, event: Event, at_s: float, *, steps_now: bool = False) -> Incarnation:
        """The incarnation was alive at `at_s`, and (with `steps_now`) had done `step` steps."""
        one = self._incarnation(event)
        one.last_sign_s = max(one.last_sign_s, at_s)
        step = event.get("step")
        if steps_now and step is not None and one.first_step_s is not None:
            if one.last_step_s is None or step > one.last_step:
                one.last_step, one.last_step_s = step, at_s
            elif step == one.last_step:
                one.last_step_s = min(one.last_step_s, at_s)
        one.odometer = max(one.odometer, event.get("odometer") or 0)
        return one

    def on_syncer_start(self, event: Event) -> None:
        self._epoch = event["epoch"]

    def on_join(self, event: Event) -> None:
        life = self.life(event)
        life.joins += 1
        life.first_join_s = event["t_s"] if life.first_join_s is None else life.first_join_s
        life.planned = bool(event.get("planned", life.planned))
        life.strategy = str(event.get("strategy") or life.strategy)
        life.ranks = event.get("ranks") or life.ranks
        name = event.get("incarnation")
        if name is None and event["continues"]:
            name = next(reversed(life.incarnations), None)
        name = str(name or f"generation {self._epoch}.{event['generation']}")
        life.by_generation[self._epoch, event["generation"]] = name
        life.incarnations.setdefault(name, Incarnation())
        former = life.incarnations.get(event.get("former") or "")
        if former is not None:  # whose account this one carries on, from a cut of the run
            former.odometer = 0

    def on_state(self, event: Event) -> None:
        one = self._incarnation(event)
        if event["state"] == "training" and one.first_step_s is None:
            began = finite(event.get("first_step_started_s"))
            one.first_step_s = event["t_s"] if began is None else began
            one.last_step_s = event["t_s"]
        if event["state"] == "finishing":
            one.finished = True
        if event["state"] not in ("lost", "paused"):  # those the syncer may have found by itself
            self._sign(event, event["t_s"], steps_now=True)

    def on_learner_stats(self, event: Event) -> None:
        life = self.life(event)
        reported = finite(event.get("last_report_s"))
        one = self._sign(event, event["t_s"] if reported is None else reported, steps_now=True)
        one.seconds_stepping = max(
            one.seconds_stepping, finite(event.get("seconds_stepping")) or 0.0
        )
        life.steps_unreported_max = max(
            life.steps_unreported_max, event.get("steps_unreported_max") or 0
        )
        for name in MEASURED:
            value = finite(event.get(name))
            life.measured[name] = life.measured[name] if value is None else value
        loss = finite(event.get("loss"))
        life.loss = life.loss if loss is None else loss
        session = (self._epoch, event["generation"])
        up, down = life.wire.get(session, (0, 0))
        life.wire[session] = (
            max(up, event.get("bytes_up") or 0),
            max(down, event.get("bytes_down") or 0),
        )

    def on_contribution(self, event: Event) -> None:
        self._sign(event, event["t_s"])

    def on_apply(self, event: Event) -> None:
        self._sign(event, event["t_s"])

    def on_learner_checkpoint(self, event: Event) -> None:
        self._sign(event, event["t_s"])

    def on_leave(self, event: Event) -> None:
        one = self._sign(event, event["t_s"])
        one.finished = one.finished or event["cause"] == "finished"


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a run that the summary reports, in seconds.

    `alive`: per learner. `allocated` and `stepping`: sums over planned learners.
    """

    start_s: float
    end_s: float
    alive: dict[str, float]
    allocated: float
    stepping: float
    covered: float  # with at least one learner between two steps of one incarnation

    @property
    def goodput(self) -> float:
        """Stepping / allocated; millisecond jitter of two clocks is not let above 1."""
        return min(1.0, self.stepping / self.allocated) if self.allocated > 0 else 0.0

    @property
    def uptime(self) -> float:
        """Covered share of the window."""
        window = self.end_s - self.start_s
        return self.covered / window if window > 0 else 0.0


def times(lives: Lives, planned: int | None) -> Times:
    """Window and times of a run of `planned` learners (None: exactly those that came).

    A planned learner is allocated from the window's start (from its join, if that was later) to
    its own last step if it finished, else to the window's end; one that never came, all of it.
    """
    stepped = [one for life in lives.learners.values() for one in life.stepped]
    if not stepped:
        return Times(0.0, 0.0, dict.fromkeys(lives.learners, 0.0), 0.0, 0.0, 0.0)
    start = min(one.first_step_s for one in stepped)
    end = max(one.last_step_s for one in stepped)
    counted = [life for life in lives.learners.values() if life.planned]
    missing = max(0, (planned or 0) - len(counted))
    return Times(
        start,
        end,
        {name: _alive(life, end) for name, life in lives.learners.items()},
        sum(_allocated(life, start, end) for life in counted) + missing * (end - start),
        sum(life.seconds_stepping for life in counted),
        _covered((one.first_step_s, one.last_step_s) for one in stepped),
    )


def _alive(life: Life, end: float) -> float:
    return sum(max(0.0, min(one.last_sign_s, end) - one.first_step_s) for one in life.stepped)


def _allocated(life: Life, start: float, end: float) -> float:
    begin = max(start, life.first_join_s or start)
    last = life.stepped[-1] if life.stepped else None
    finish = (
        last.last_step_s if last and next(reversed(life.incarnations.values())).finished else end
    )
    return max(0.0, finish - begin)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of closed intervals."""
    total, reached = 0.0, float("-inf")
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, reached))
        reached = max(reached, finish)
    return total
