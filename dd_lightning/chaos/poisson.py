"""A Poisson process of faults: exponential gaps, kinds and targets, all drawn from one seed.

Gaps are drawn in units of their mean, which may become known only once steps have been measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dd_lightning.algorithm.checks import check_number, refuse
from dd_lightning.chaos.faults import Fault, known_keys, read_kind


@dataclass(frozen=True, slots=True)
class Choice:
    """One kind of fault that may be drawn; target None: a learner, each equally likely."""

    kind: str
    target: str | None
    options: Mapping[str, Any]
    weight: float


@dataclass(frozen=True, slots=True)
class PoissonPlan:
    """What is drawn, and how often.

    Args:
        mean_s: mean time between faults; None: `per_run` faults in the time that they may fire.
        first: number of its first fault.
    """

    choices: Sequence[Choice]
    learners: Sequence[str]
    seed: int
    mean_s: float | None
    per_run: float
    first: int = 0

    def scaled(self, window_s: float) -> float:
        """The mean in seconds, where faults may fire for `window_s`."""
        return self.mean_s if self.mean_s is not None else window_s / self.per_run

    def draw(self, mean_s: float) -> Iterator[tuple[float, Fault]]:
        """Without end: (seconds since the process began, fault); the same for the same seed."""
        rng = Random(f"chaos:{self.seed}")
        at_s, number = 0.0, self.first
        weights = [choice.weight for choice in self.choices]
        while True:
            at_s += mean_s * rng.expovariate(1.0)
            (choice,) = rng.choices(self.choices, weights)
            drawn = rng.choice(self.learners)  # drawn always: a fixed target changes nothing else
            target = choice.target or drawn
            yield at_s, Fault(number, choice.kind, target, poisson=mean_s, options=choice.options)
            number += 1


def read_poisson(
    values: Mapping[str, Any], learners: Sequence[str], seed: int, first: int
) -> PoissonPlan:
    """From the settings `chaos.poisson`.

    Raises:
        ValueError: a key or value that is not allowed.
    """
    where = "chaos.poisson."
    known_keys(values, ("mean_s", "per_run", "faults"), where)
    mean_s = values.get("mean_s")
    if mean_s is not None:
        mean_s = check_number(f"{where}mean_s", mean_s, above=0.0)
    per_run = check_number(f"{where}per_run", values.get("per_run", 3), above=0.0)
    faults = values.get("faults")
    if not isinstance(faults, Sequence) or isinstance(faults, str) or not faults:
        raise refuse(f"{where}faults", faults, "a list of kinds, as [{kind: kill, weight: 3}]")
    choices = []
    for index, entry in enumerate(faults):
        prefix = f"{where}faults[{index}]."
        kind, target, options = read_kind(entry, learners, prefix, ("target", "weight"))
        weight = check_number(f"{prefix}weight", entry.get("weight", 1), above=0.0)
        choices.append(Choice(kind, target, options, weight))
    return PoissonPlan(choices, tuple(learners), seed, mean_s, per_run, first)
