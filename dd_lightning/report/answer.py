"""The question of a run and its answer, in plain sentences: what stands at the top of its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dd_lightning.report.comparison import compare_bytes, format_bytes


@dataclass(frozen=True, slots=True)
class Told:
    """What the answer is made from.

    Args:
        parameters: trainable elements of Θ.
        fired: faults that fired, by kind.
        longest_round_s: from opening to merge; None without a merge.
    """

    summary: Mapping[str, Any]
    parameters: int
    config: Mapping[str, Any] = field(default_factory=dict)
    fired: Mapping[str, int] = field(default_factory=dict)
    longest_round_s: float | None = None

    @property
    def is_data_parallel(self) -> bool:
        """Whether this is the baseline, which has neither syncer nor contributions."""
        algorithm = self.config.get("algorithm")
        return isinstance(algorithm, Mapping) and algorithm.get("preset") == "data_parallel"


def question(told: Told) -> str:
    """What one asks of such a run."""
    faults = sum(told.fired.values())
    if faults:
        return f"Did the run hold up under {_counted(faults, 'fault')}, and what did they cost?"
    if told.is_data_parallel:
        return "What did data-parallel training come to, and what did it wait for?"
    if told.summary["learners"] == 1:
        return "What did one learner come to?"
    return "Did the learners learn together without waiting for each other, and for how many bytes?"


def answer(told: Told) -> str:
    """Two to four sentences: the loss, the time, the bytes, and what faults cost."""
    sentences = [_loss(told), _work(told), _faults(told), _bytes(told)]
    return " ".join(f"{one}." for one in sentences if one)


def _loss(told: Told) -> str:
    summary = told.summary
    loss, who = summary["loss"], _counted(summary["learners"], "learner") + _places(told.config)
    within = f"in {format_seconds(summary['seconds'])}"
    first, last = loss["initial"], loss["validation"]
    if last is None:
        merges = _counted(summary["rounds"], "merge")
        return f"{who} made {merges} {within}; no validation loss was measured"
    if first is None:
        return f"{who} reached a validation loss of {last:.3f} {within}"
    verb = "brought" if last <= first else "moved"
    return f"{who} {verb} the validation loss from {first:.3f} to {last:.3f} {within}"


def _places(config: Mapping[str, Any]) -> str:
    """` in us east, eu west and ap northeast`; nothing where all sit in one place."""
    network = config.get("network")
    if not isinstance(network, Mapping):
        return ""
    regions = network.get("learner_regions") or network.get("regions") or ()
    count = config.get("learners")
    taken = list(regions)[: count if isinstance(count, int) else None]
    names = list(dict.fromkeys(str(region).replace("_", " ") for region in taken))
    if len(names) < 2:
        return ""
    return f" in {', '.join(names[:-1])} and {names[-1]}"


def _work(told: Told) -> str:
    summary = told.summary
    said = (
        f"{summary['goodput']:.1%} of the time allocated to them was computing (goodput) and "
        f"{summary['tokens_merged_share']:.1%} of their tokens were merged"
    )
    if told.longest_round_s is not None and not told.is_data_parallel:
        said += f"; no round took longer than {format_seconds(told.longest_round_s)}"
    return said


def _faults(told: Told) -> str:
    if not told.fired:
        return ""
    summary = told.summary
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in told.fired.items())
    learners = summary["per_learner"].values()
    tokens = sum(one["tokens"] for one in learners) or 1
    lost = sum(one["tokens_lost"] for one in learners) / tokens
    count = sum(told.fired.values())
    return (
        f"With {_counted(count, 'fault')} ({kinds}) {lost:.1%} of the tokens were lost, whatever "
        f"the cause; somebody trained {summary['uptime']:.1%} of the time (uptime)"
    )


def _bytes(told: Told) -> str:
    if told.is_data_parallel:
        return f"{format_bytes(told.summary['bytes']['up'])} went from member to member"
    compared = compare_bytes(told.summary, told.parameters)
    if compared["ratio"] is None:
        return ""
    return (
        f"{format_bytes(compared['sent'])} crossed the wire, where data-parallel training of the "
        f"same steps would have sent {format_bytes(compared['data_parallel'])} "
        f"({compared['ratio']:.3g} times as much)"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """`0.083 s`, `42.1 s`, `5 min 08 s`, `2 h 05 min`."""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
