"""What the figures draw, collected from a tape in one pass: points, lanes, bytes, losses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dd_lightning.report.faults import Faults
from dd_lightning.report.observer import Event, Observer, finite, learner_ids, merge_count
from dd_lightning.report.steps import StepPoint

STEPPING, PAUSED, HANDING_IN, AWAY = "stepping", "paused", "handing in", "away"
LANE_OF = {
    "training": STEPPING,
    "paused": PAUSED,
    "finishing": HANDING_IN,
    "lost": AWAY,
    "gone": None,
    "joining": None,
}


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Validation loss of Θ as it stood `at_s` seconds into the run."""

    at_s: float
    tokens: float | None  # merged until then
    loss: float


@dataclass(frozen=True, slots=True)
class MergePoint:
    """One merge."""

    at_s: float
    fragment: int
    version: int  # merges of this fragment so far
    contributors: int
    quorum_s: float
    grace_s: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A learner was in one state for a while."""

    begin_s: float
    end_s: float
    state: str


class Series(Observer):
    """Collects, in the order of the tape; nothing is thinned out here."""

    def __init__(self) -> None:
        self.evaluated: list[Evaluated] = []
        self.merges: list[MergePoint] = []
        self.steps: list[StepPoint] = []  # of a data-parallel run
        self.stretches: dict[str, list[Stretch]] = {}
        self.contributed: dict[str, list[tuple[float, int]]] = {}  # accepted: arrival, round
        self.transfers: list[tuple[float, float, int, int]] = []  # from_s, to_s, up, down
        self.faults = Faults()
        self.warnings: Counter[str] = Counter()
        self.end_s = 0.0
        self._state: dict[str, tuple[float, str]] = {}  # since when, which
        self._wire: dict[tuple[str, int, int], tuple[float, int, int]] = {}
        self._epoch = 0

    def feed(self, event: Event) -> None:
        if event["event"] not in ("evaluation", "run_end", "ledger"):
            self.end_s = max(self.end_s, finite(event["t_s"]) or 0.0)
        super().feed(event)
        self.faults.feed(event)

    def on_syncer_start(self, event: Event) -> None:
        self._epoch = event["epoch"]

    def on_evaluation(self, event: Event) -> None:
        loss, at_s = finite(event["loss"]), finite(event.get("checkpoint_t_s"))
        if loss is not None and at_s is not None:
            tokens = 0.0 if event.get("initial") else finite(event.get("tokens_merged"))
            self.evaluated.append(Evaluated(at_s, tokens, loss))

    def on_merge(self, event: Event) -> None:
        self.merges.append(
            MergePoint(
                event["t_s"],
                event["fragment"],
                merge_count(event["version"]),
                len(learner_ids(event["contributors"])),
                finite(event["quorum_s"]) or 0.0,
                finite(event["grace_s"]) or 0.0,
            )
        )

    def on_all_reduce(self, event: Event) -> None:
        compute_s, reduce_s = finite(event["compute_s"]), finite(event["reduce_s"])
        self.steps.append(StepPoint(event["t_s"], event["step"], compute_s or 0.0, reduce_s or 0.0))

    def on_contribution(self, event: Event) -> None:
        if event["verdict"] == "accepted":
            self.contributed.setdefault(str(event["learner"]), []).append(
                (event["t_s"], event["round"])
            )

    def _enter(self, learner: str, at_s: float, state: str | None) -> None:
        """Close the learner's present stretch and begin `state` (None: nothing is drawn)."""
        since, present = self._state.pop(learner, (at_s, None))
        lane = self.stretches.setdefault(learner, [])
        if present == state:
            at_s = since
        elif present is not None:
            lane.append(Stretch(since, max(since, at_s), present))
        if state is not None:
            self._state[learner] = (at_s, state)

    def on_join(self, event: Event) -> None:
        learner = str(event["learner"])
        self.stretches.setdefault(learner, [])
        self._wire[learner, self._epoch, event["generation"]] = (event["t_s"], 0, 0)

    def on_state(self, event: Event) -> None:
        learner, state = str(event["learner"]), LANE_OF.get(event["state"])
        at_s, began = event["t_s"], finite(event.get("first_step_started_s"))
        since = self._state.get(learner, (0.0, ""))[0]
        if state == STEPPING and began is not None and began >= since:
            at_s = began  # its first step; after a pause or a re-attach that lies further back
        away = self._state.get(learner, (0.0, ""))[1] == AWAY
        if not (away and state is None):  # away until its next step
            self._enter(learner, at_s, state)

    def on_dead(self, event: Event) -> None:
        self._enter(str(event["learner"]), event["t_s"], AWAY)

    def on_leave(self, event: Event) -> None:
        self._enter(str(event["learner"]), event["t_s"], None)

    def on_learner_stats(self, event: Event) -> None:
        session = (str(event["learner"]), self._epoch, event["generation"])
        up, down = event.get("bytes_up") or 0, event.get("bytes_down") or 0
        since, up_before, down_before = self._wire.get(session, (event["t_s"], 0, 0))
        self._wire[session] = (event["t_s"], up, down)
        if up > up_before or down > down_before:
            self.transfers.append((since, event["t_s"], up - up_before, down - down_before))

    def on_warning(self, event: Event) -> None:
        self.warnings[str(event["text"])] += 1

    def on_refused(self, event: Event) -> None:
        self.warnings[f"refused: {event['reason']}"] += int(event["count"])

    def lanes(self) -> dict[str, list[Stretch]]:
        """Per learner its stretches, those still open until the end of the tape."""
        lanes = {learner: list(lane) for learner, lane in self.stretches.items()}
        for learner, (since, state) in self._state.items():
            lanes[learner].append(Stretch(since, max(since, self.end_s), state))
        return lanes

    def byte_rates(self, bins: int = 120, least_s: float = 2.0) -> tuple[list[float], ...]:
        """Bytes per second over time: (begins of bins in s, up, down).

        What a report says was sent since the one before is spread evenly over that time. A bin is
        at least `least_s` long: the tape has a report about every two seconds.
        """
        last = max((to_s for _, to_s, _, _ in self.transfers), default=0.0)
        width = max(least_s, last / bins)
        count = int(last / width) + 1
        up, down = [0.0] * count, [0.0] * count
        for from_s, to_s, more_up, more_down in self.transfers:
            first, final = int(from_s / width), int(to_s / width)
            for index in range(first, final + 1):
                overlap = min(to_s, (index + 1) * width) - max(from_s, index * width)
                share = overlap / (to_s - from_s) if to_s > from_s else 1.0
                up[index] += more_up * share / width
                down[index] += more_down * share / width
        return [index * width for index in range(count)], up, down
