"""From tape events to metric points (name, value, step, context), thinned; knows nothing of Aim."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dd_lightning.report.observer import Event, finite, learner_ids


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a series; `context` tells series of one name apart (learner, fragment)."""

    name: str
    value: float
    step: int
    context: dict[str, Any] = field(default_factory=dict)


class Points:
    """Makes the points of a run.

    A series gets at most one point per `least_interval_s` of the run's own time, so that what a
    dashboard costs does not grow with the rate of rounds. Evaluations are never left out.
    """

    def __init__(self, least_interval_s: float = 2.0) -> None:
        self.least_interval_s = least_interval_s
        self._now_s = 0.0
        self._last_s: dict[tuple[str, str, Any], float] = {}
        self._progress: dict[str, tuple[float, int]] = {}  # learner to time and odometer
        self._wire: dict[tuple[str, int], tuple[int, int]] = {}

    def of(self, event: Event) -> Iterator[Point]:
        """Points that `event` adds."""
        self._now_s = max(self._now_s, finite(event["t_s"]) or 0.0)
        make = getattr(self, f"_of_{event['event']}", None)
        for name, value, step, context in make(event) if make else ():
            number = finite(value)
            if number is not None and self._due(event["event"], name, context):
                yield Point(name, number, int(step), context)

    def _due(self, kind: str, name: str, context: dict[str, Any]) -> bool:
        """A series is named by its context's values; there is only one key in each."""
        if kind == "evaluation":
            return True
        key = (name, next(iter(context), ""), next(iter(context.values()), ""))
        last = self._last_s.get(key)
        if last is not None and self._now_s - last < self.least_interval_s:
            return False
        self._last_s[key] = self._now_s
        return True

    def _of_learner_stats(self, event: Event) -> Iterator[tuple[str, Any, int, dict[str, Any]]]:
        learner, step = str(event["learner"]), event["step"]
        context = {"learner": learner}
        since, before = self._progress.get(learner, (event["t_s"], event["odometer"]))
        self._progress[learner] = (event["t_s"], event["odometer"])
        elapsed, tokens = event["t_s"] - since, event["odometer"] - before
        yield "train_loss", event.get("loss"), step, context
        if elapsed > 0 and tokens >= 0:  # a new incarnation's odometer begins at 0
            yield "tokens_per_s", tokens / elapsed, step, context
        yield "rtt_ms", event.get("rtt_ms_p50"), step, context
        yield "step_seconds", event.get("step_seconds_p50"), step, context
        yield "version_gap", event.get("version_gap"), step, context
        session = (learner, event["generation"])
        self._wire[session] = (event.get("bytes_up") or 0, event.get("bytes_down") or 0)
        second = int(self._now_s)
        yield "bytes_up", sum(up for up, _ in self._wire.values()), second, {}
        yield "bytes_down", sum(down for _, down in self._wire.values()), second, {}

    def _of_contribution(self, event: Event) -> Iterator[tuple[str, Any, int, dict[str, Any]]]:
        if event["verdict"] == "accepted":
            context = {"learner": str(event["learner"])}
            yield "staleness", event.get("staleness"), event["round"], context

    def _of_merge(self, event: Event) -> Iterator[tuple[str, Any, int, dict[str, Any]]]:
        number, context = event["round"], {"fragment": event["fragment"]}
        members = learner_ids(event["contributors"])
        yield "contributors", len(members), number, {}
        yield "grace_s", event["grace_s"], number, {}
        yield "quorum_s", event["quorum_s"], number, {}
        yield "tokens_merged", event.get("tokens_merged"), number, {}
        yield "agreement", event["agreement"], number, context
        yield "outer_norm", event.get("outer_norm"), number, context
        for learner, weight in zip(members, event.get("weights") or (), strict=False):
            yield "weight", weight, number, {"learner": learner}

    def _of_evaluation(self, event: Event) -> Iterator[tuple[str, Any, int, dict[str, Any]]]:
        tokens = 0 if event.get("initial") else finite(event.get("tokens_merged")) or 0
        context = {"subset": "validation"}
        yield "validation_loss", event["loss"], int(tokens), context
        for name, value in (event["metrics"] or {}).items():
            yield str(name), value, int(tokens), context
