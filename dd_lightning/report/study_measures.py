"""What a study can compare its runs by: one number of each run, from its summary and its tape."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dd_lightning.report.observer import Event, Observer, finite
from dd_lightning.report.own_metrics import learners_mean
from dd_lightning.report.series import Evaluated

MIB = 2**20
BYTES_PER_ELEMENT = 4
BITS_PER_MBIT = 1e6
LOSS, COSTS = "validation_loss", ("seconds", "bytes", "faults")  # in every CSV, whatever is asked


class StudyFacts(Observer):
    """What measures need of a tape beyond the summary; memory grows with evaluations and merges."""

    def __init__(self) -> None:
        self.elements: list[int] = []
        self.evaluated: list[Evaluated] = []  # by time
        self.agreements: list[float] = []
        self.opened_s: list[float] = []  # of rounds
        self.shares: dict[str, float] = {}  # of weight, by learner: sums over merges
        self.faults = 0
        self.sent: list[tuple[float, int]] = [(0.0, 0)]  # time, bytes up and down until then
        self._wire: dict[tuple[str, int, int], int] = {}  # by learner, epoch and generation
        self._epoch = 0

    def on_syncer_start(self, event: Event) -> None:
        self._epoch = event["epoch"]

    def on_learner_stats(self, event: Event) -> None:
        session = (str(event["learner"]), self._epoch, event["generation"])
        count = (event.get("bytes_up") or 0) + (event.get("bytes_down") or 0)
        more = max(0, count - self._wire.get(session, 0))
        self._wire[session] = self._wire.get(session, 0) + more
        self.sent.append((event["t_s"], self.sent[-1][1] + more))

    def on_layout(self, event: Event) -> None:
        self.elements = [int(count) for count in event["elements"]]

    def on_round_open(self, event: Event) -> None:
        self.opened_s.append(event["t_s"])

    def on_fault(self, event: Event) -> None:
        self.faults += event["fired"] is not None and event["fired"] is not False

    def on_merge(self, event: Event) -> None:
        weights = event.get("weights") or ()
        for learner, weight in zip(event["contributors"], weights, strict=False):
            share = weight / sum(weights) if weight else 0.0
            self.shares[str(learner)] = self.shares.get(str(learner), 0.0) + share
        agreement = finite(event["agreement"])
        if agreement is not None and len(event["contributors"]) > 1:
            self.agreements.append(agreement)  # one contribution agrees with itself

    def on_evaluation(self, event: Event) -> None:
        loss, at_s = finite(event["loss"]), finite(event.get("checkpoint_t_s"))
        if loss is None or at_s is None:
            return
        tokens = 0.0 if event.get("initial") else finite(event.get("tokens_merged"))
        if event.get("final"):  # the last checkpoint, which may have been evaluated before
            self.evaluated = [one for one in self.evaluated if one.at_s != at_s]
        self.evaluated.append(Evaluated(at_s, tokens, loss))
        self.evaluated.sort(key=lambda one: one.at_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """A run as its measures see it, with the targets of its study."""

    summary: Mapping[str, Any]
    facts: StudyFacts = field(default_factory=StudyFacts)
    target_loss: float | None = None
    target_tokens: float | None = None
    equal_tokens: float | None = None  # merged by every run of the study
    folder: Path | None = None  # of the run


@dataclass(frozen=True, slots=True)
class Measure:
    """How one number of a run is got and shown."""

    label: str  # with its unit, as on an axis
    of: Callable[[Measured], float | None]
    scale: float = 1.0  # shown value = value x scale
    form: str = ".4g"


def _summary(*path: str) -> Callable[[Measured], float | None]:
    def read(run: Measured) -> float | None:
        value: Any = run.summary
        for key in path:
            value = value[key]
        return finite(value)

    return read


def _metric(name: str) -> Callable[[Measured], float | None]:
    """Of the last evaluation of Θ; None for a task that has no such metric."""
    return lambda run: finite(run.summary["metrics"].get(name))


def _worst_group(run: Measured) -> float | None:
    """Of task.data.group_losses=true: the highest loss of a group (era, class, library)."""
    metrics = run.summary["metrics"].items()
    known = [finite(value) for name, value in metrics if name.startswith("validation_loss_")]
    return max((value for value in known if value is not None), default=None)


def _own_accuracy(run: Measured) -> float | None:
    """Of learners that validate their own weights (trainer.limit_val_batches above 0)."""
    return None if run.folder is None else learners_mean(run.folder, "accuracy")


def _accuracy_lost(run: Measured) -> float | None:
    """How much worse Θ is than the learners are on average."""
    own, merged = _own_accuracy(run), _metric("accuracy")(run)
    return None if own is None or merged is None else own - merged


def _over_learners(key: str) -> Callable[[Measured], float | None]:
    return lambda run: float(sum(one[key] for one in run.summary["per_learner"].values()))


def loss_at(points: list[Evaluated], tokens: float | None) -> float | None:
    """Loss when so many tokens were merged, between two evaluations on a straight line.

    None where the curve does not reach so far.
    """
    if tokens is None:
        return None
    known = [(one.tokens, one.loss) for one in points if one.tokens is not None]
    return _between(known, tokens)


def seconds_to_loss(run: Measured) -> float | None:
    """When the curve first falls to the target, between two evaluations on a straight line."""
    target, points = run.target_loss, run.facts.evaluated
    if target is None:
        return None
    for before, after in itertools.pairwise(points):
        if after.loss <= target:
            if before.loss <= target:
                return before.at_s
            share = (before.loss - target) / (before.loss - after.loss)
            return before.at_s + share * (after.at_s - before.at_s)
    return None


def seconds_to_tokens(run: Measured) -> float | None:
    """When the target number of tokens had been merged, as far as evaluations tell."""
    known = [(one.tokens, one.at_s) for one in run.facts.evaluated if one.tokens is not None]
    return None if run.target_tokens is None else _between(known, run.target_tokens)


def sent_at(facts: StudyFacts, at_s: float) -> float:
    """Bytes that all learners had sent and received by a time of the run."""
    within = _between([(time_s, float(count)) for time_s, count in facts.sent], at_s)
    return float(facts.sent[-1][1]) if within is None else within


def _between(points: list[tuple[float, float]], at: float) -> float | None:
    """Of (x, y) with ascending x: y at `at`."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= at <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return None


def _largest_fragment(run: Measured) -> float | None:
    elements = run.facts.elements
    return max(elements) / statistics.fmean(elements) if sum(elements) else None


def _link_needed(run: Measured) -> float | None:
    """The largest fragment has to be gone before the next round opens."""
    opened, elements = run.facts.opened_s, run.facts.elements
    gaps = [after - before for before, after in itertools.pairwise(opened)]
    gap_s = statistics.median(gaps) if gaps else 0.0
    bits = 8 * BYTES_PER_ELEMENT * max(elements, default=0)
    return bits / gap_s / BITS_PER_MBIT if gap_s > 0 else None


def _agreement(run: Measured) -> float | None:
    return statistics.fmean(run.facts.agreements) if run.facts.agreements else None


def _least_weight_share(run: Measured) -> float | None:
    """Of the learner that counted least, over all merges; alike for all: 1 / learners."""
    learners, shares = run.summary["per_learner"], run.facts.shares
    merges = sum(shares.values())
    return min(shares.get(one, 0.0) for one in learners) / merges if merges else None


def _bytes(run: Measured) -> float:
    """Up and down, of all learners."""
    return float(run.summary["bytes"]["up"] + run.summary["bytes"]["down"])


MEASURES: dict[str, Measure] = {
    "validation_loss": Measure("validation loss of Θ", _summary("loss", "validation"), form=".4f"),
    "initial_loss": Measure("at the start", _summary("loss", "initial"), form=".4f"),
    "bits_per_byte": Measure("bits per byte", _metric("bits_per_byte"), form=".4f"),
    "worst_group_loss": Measure("validation loss of the worst group", _worst_group, form=".4f"),
    "accuracy": Measure("accuracy (%)", _metric("accuracy"), 100.0, ".1f"),
    "learner_accuracy": Measure("mean accuracy of learners (%)", _own_accuracy, 100.0, ".1f"),
    "accuracy_lost": Measure("lost by merging (points)", _accuracy_lost, 100.0, ".2f"),
    "recall_at_1": Measure("recall@1 (%)", _metric("recall_at_1"), 100.0, ".1f"),
    "expert_share_min": Measure(
        "tokens of the least used expert (%)", _metric("expert_share_min"), 100.0, ".1f"
    ),
    "train_last": Measure("last training loss", _summary("loss", "train_last"), form=".4f"),
    "loss_at_equal_tokens": Measure(
        "validation loss at equal tokens",
        lambda run: loss_at(run.facts.evaluated, run.equal_tokens),
        form=".4f",
    ),
    "goodput": Measure("goodput (%)", _summary("goodput"), 100.0, ".1f"),
    "uptime": Measure("uptime (%)", _summary("uptime"), 100.0, ".1f"),
    "tokens_merged_share": Measure(
        "tokens merged (%)", _summary("tokens_merged_share"), 100.0, ".1f"
    ),
    "seconds": Measure("time of the run (s)", _summary("seconds"), form=".1f"),
    "seconds_to_loss": Measure("time to the loss (s)", seconds_to_loss, form=".1f"),
    "seconds_to_tokens": Measure("time to the tokens (s)", seconds_to_tokens, form=".1f"),
    "rounds": Measure("merges", _summary("rounds"), form=".0f"),
    "effective_h": Measure("effective H (steps)", _summary("effective_h"), form=".1f"),
    "contributors": Measure("contributors", _summary("contributors", "mean"), form=".2f"),
    "least_weight_share": Measure("least share of weight (%)", _least_weight_share, 100.0, ".1f"),
    "agreement": Measure("agreement of contributions", _agreement, form=".3f"),
    "steps": Measure("steps of all learners", _over_learners("steps"), form=".0f"),
    "tokens": Measure("tokens processed (thousands)", _over_learners("tokens"), 1e-3, ".0f"),
    "tokens_merged": Measure(
        "tokens merged (thousands)", _over_learners("tokens_merged"), 1e-3, ".0f"
    ),
    "tokens_lost": Measure("tokens lost (thousands)", _over_learners("tokens_lost"), 1e-3, ".0f"),
    "bytes": Measure("sent both ways (MiB)", _bytes, 1 / MIB, ".1f"),
    "bytes_up": Measure("sent by learners (MiB)", _summary("bytes", "up"), 1 / MIB, ".1f"),
    "faults": Measure("faults", lambda run: float(run.facts.faults), form=".1f"),
    "bytes_down": Measure("sent to learners (MiB)", _summary("bytes", "down"), 1 / MIB, ".1f"),
    "largest_fragment": Measure("largest fragment / mean", _largest_fragment, form=".2f"),
    "link_needed": Measure("link a learner needs (Mbit/s)", _link_needed, form=".2f"),
}


OF_METRICS = "metrics."  # before the name of any metric that a task logs of Θ


def find_measure(name: str) -> Measure | None:
    """The measure of that name: one of `MEASURES`, or metrics.NAME; None: there is none."""
    metric = name.removeprefix(OF_METRICS)
    if metric != name and metric:
        return Measure(metric.replace("_", " "), _metric(metric), form=".4f")
    return MEASURES.get(name)


def measure_of(name: str) -> Measure:
    """The same of a name that was checked."""
    found = find_measure(name)
    assert found is not None, name
    return found
