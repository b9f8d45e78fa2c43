"""From tape events to metric points and notes, thinned; knows nothing of any logger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dd_lightning.report.faults import Faults
from dd_lightning.report.observer import Event, finite, learner_ids

INNER_STEP, ROUND, SECOND, TOKENS = "inner_step", "round", "second", "tokens_merged"
Context = Mapping[str, str | int]

VALIDATION: Context = {"subset": "validation"}
SYNCER: Context = {"process": "syncer"}


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a series; `context` tells series of one name apart (learner, fragment)."""

    name: str
    value: float
    step: int
    axis: str  # what `step` counts
    context: Context = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened, in words: a join, a loss, a fault, a warning."""

    kind: str  # the tape event's name
    at_s: float
    text: str


_Raw = tuple[str, Any, int, str, Context]  # a point whose value may be null or not finite


class Points:
    """Makes the points of a run.

    A series gets at most one point per `least_interval_s` of the run's own time, so that what a
    dashboard costs does not grow with the rate of rounds. Evaluations and faults are never left
    out.
    """

    def __init__(self, least_interval_s: float = 2.0) -> None:
        self.least_interval_s = least_interval_s
        self.now_s = 0.0  # newest time seen
        self._last_s: dict[tuple[str, tuple[Any, ...]], float] = {}
        self._progress: dict[str, tuple[int, float, int]] = {}  # learner: step, time, odometer
        self._wire: dict[tuple[str, int], tuple[int, int]] = {}  # by generation: up, down
        self._training: set[str] = set()
        self._num_faults = 0

    def of(self, event: Event) -> Iterator[Point]:
        """Points that `event` adds."""
        self.now_s = max(self.now_s, finite(event["t_s"]) or 0.0)
        make = getattr(self, f"_of_{event['event']}", None)
        for name, value, step, axis, context in make(event) if make else ():
            number = finite(value)
            if number is not None and self._due(event["event"], name, context):
                yield Point(name, number, int(step), axis, context)

    def _due(self, kind: str, name: str, context: Context) -> bool:
        if kind in ("evaluation", "fault"):
            return True
        key = (name, tuple(context.items()))
        last = self._last_s.get(key)
        if last is not None and self.now_s - last < self.least_interval_s:
            return False
        self._last_s[key] = self.now_s
        return True

    def _of_learner_stats(self, event: Event) -> Iterator[_Raw]:
        learner = str(event["learner"])
        if self._progress.get(learner, (None,))[0] != event["step"]:
            yield from self._of_steps(learner, event)
        self._wire[learner, event["generation"]] = (
            event.get("bytes_up") or 0,
            event.get("bytes_down") or 0,
        )
        second = int(self.now_s)
        for index, name in enumerate(("bytes_up", "bytes_down")):
            own = sum(wire[index] for (who, _), wire in self._wire.items() if who == learner)
            yield name, own, second, SECOND, {"learner": learner}
            yield name, sum(wire[index] for wire in self._wire.values()), second, SECOND, SYNCER

    def _of_steps(self, learner: str, event: Event) -> Iterator[_Raw]:
        """What is drawn over a learner's steps: nothing new while it makes none."""
        step, context = event["step"], {"learner": learner}
        now = (step, event["t_s"], event["odometer"])
        _, since, before = self._progress.get(learner, now)
        self._progress[learner] = now
        elapsed, tokens = event["t_s"] - since, event["odometer"] - before
        yield "train_loss", event.get("loss"), step, INNER_STEP, context
        if elapsed > 0 and tokens >= 0:  # a new incarnation's odometer begins at 0
            yield "tokens_per_s", tokens / elapsed, step, INNER_STEP, context
        yield "rtt_ms", event.get("rtt_ms_p50"), step, INNER_STEP, context
        yield "step_seconds", event.get("step_seconds_p50"), step, INNER_STEP, context
        yield "version_gap", event.get("version_gap"), step, INNER_STEP, context

    def _of_contribution(self, event: Event) -> Iterator[_Raw]:
        if event["verdict"] == "accepted":
            context = {"learner": str(event["learner"])}
            yield "staleness", event.get("staleness"), event["round"], ROUND, context

    def _of_merge(self, event: Event) -> Iterator[_Raw]:
        number, context = event["round"], {"fragment": event["fragment"]}
        members, weights = learner_ids(event["contributors"]), event.get("weights") or ()
        yield "contributors", len(members), number, ROUND, context
        for name in ("grace_s", "quorum_s", "merge_s", "agreement", "cosine", "outer_norm"):
            yield name, event.get(name), number, ROUND, context
        yield "tokens_merged", event.get("tokens_merged"), number, ROUND, SYNCER
        yield "run_seconds", event["t_s"], number, ROUND, SYNCER
        total = sum(weights)
        for learner, weight in zip(members, weights, strict=False):
            yield "weight", weight, number, ROUND, {"learner": learner}
            if total > 0:
                yield "weight_share", weight / total, number, ROUND, {"learner": learner}
        for learner, norm in (event.get("norms") or {}).items():
            yield "contribution_norm", norm, number, ROUND, {"learner": str(learner)}

    def _of_state(self, event: Event) -> Iterator[_Raw]:
        learner = str(event["learner"])
        if event["state"] in ("training", "finishing"):
            self._training.add(learner)
        else:
            self._training.discard(learner)
        yield self._present()

    def _of_dead(self, event: Event) -> Iterator[_Raw]:
        self._training.discard(str(event["learner"]))
        yield self._present()

    _of_leave = _of_dead

    def _present(self) -> _Raw:
        return "learners_training", len(self._training), int(self.now_s), SECOND, SYNCER

    def _of_fault(self, event: Event) -> Iterator[_Raw]:
        if event["fired"] is not None and event["fired"] is not False:
            self._num_faults += 1
            yield "faults", self._num_faults, int(event["t_s"]), SECOND, SYNCER

    def _of_all_reduce(self, event: Event) -> Iterator[_Raw]:
        """A data-parallel run's step."""
        step = event["step"]
        yield "members", len(event["members"]), step, INNER_STEP, SYNCER
        for name in ("compute_s", "reduce_s"):
            yield name, event[name], step, INNER_STEP, SYNCER

    def _of_evaluation(self, event: Event) -> Iterator[_Raw]:
        tokens = 0 if event.get("initial") else finite(event.get("tokens_merged")) or 0
        yield "validation_loss", event["loss"], int(tokens), TOKENS, VALIDATION
        for name, value in (event["metrics"] or {}).items():
            yield str(name), value, int(tokens), TOKENS, VALIDATION


def notes_of(event: Event) -> Iterable[Note]:
    """What a reader of the curves should know of, at its time."""
    say = _SENTENCES.get(event["event"])
    text = say(event) if say else ""
    return [Note(event["event"], finite(event["t_s"]) or 0.0, text)] if text else []


def _fault(event: Event) -> str:
    one = Faults()
    one.feed(event)
    (fault,) = one.list()
    sentence = fault.sentence().removesuffix(": nobody was lost")  # what followed is not known here
    return sentence if fault.at_s is None else sentence.removeprefix(f"{fault.at_s:.1f} s: ")


_SENTENCES = {
    "join": lambda e: f"learner {e['learner']} joined ({e['state_from']})",
    "dead": lambda e: f"learner {e['learner']} lost ({e['cause']})",
    "leave": lambda e: f"learner {e['learner']} left ({e['cause']})",
    "syncer_start": lambda e: f"syncer restarted, epoch {e['epoch']}" if e["epoch"] > 1 else "",
    "rewind": lambda e: f"back to step {e['step']}, {e['steps_lost']} lost ({e['cause']})",
    "fault": _fault,
    "warning": lambda e: str(e["text"]),
    "run_end": lambda e: f"run {e['status']}",
}
