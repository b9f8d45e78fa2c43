"""How far unequal learners move a merge: the merged outer gradient under the contributors, steps
and weights of a run's tape, beside that of a fault-free run, both from the same Θ.

Who contributes, after how many steps and with what weight is the tapes'; the outer gradients are
draws at fixed Θ (`gradient_draws`). Not modelled: that contributions may be anchored at an older
version, and that fragments are merged one after the other; all are taken as merged at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from dd_lightning.algorithm import MERGE_RULES, MergeRule, merge_fragment, resolve
from dd_lightning.simulate.gradient_draws import Gradients, draw_gradients
from dd_lightning.syncer.checkpoint import read_checkpoint

ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class Part:
    """One contribution to a merge: whose, inner steps in it, its weight."""

    learner: str
    steps: int
    weight: float


Merge = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """The mean merge of one kind of runs beside the reference's.

    Args:
        length: of the mean, over the length of the reference's mean.
        cosine: between the two means.
        bias: length of their difference, over the length of the reference's mean.
        spread: root mean square of a single merge's distance from its own mean, in the same unit.
    """

    length: float
    cosine: float
    bias: float
    spread: float


def merges_on(tape: Iterable[Mapping[str, Any]], skip: int = 0) -> list[Merge]:
    """The ordinary merges of a run: no re-anchors, no last rounds, not the first `skip`."""
    parts: dict[tuple[Any, ...], Part] = {}
    found: list[Merge] = []
    for row in tape:
        if row["event"] == "contribution" and row["verdict"] == ACCEPTED:
            part = Part(str(row["learner"]), row["steps"], row["weight"])
            parts[row["epoch"], row["round"], part.learner] = part
        elif row["event"] == "merge" and not (row["reanchor"] or row["last"]):
            names = [(row["epoch"], row["round"], str(one)) for one in row["contributors"]]
            found.append(tuple(parts[name] for name in names if parts[name].weight > 0))
    return [merge for merge in found[skip:] if merge]


def share_of(merges: Sequence[Merge], learner: str) -> float:
    """Its share of the weight, 0 where it is absent: the mean over merges."""
    shares = [
        sum(one.weight for one in merge if one.learner == learner) / sum(o.weight for o in merge)
        for merge in merges
    ]
    return sum(shares) / len(shares)


def merge_drawn(
    merge: Merge,
    gradients: Mapping[str, Sequence[Gradients]],
    rule: MergeRule,
    averaged: frozenset[str],
) -> Tensor:
    """`[elements]`: what this merge makes of one draw of every learner's outer gradients.

    Args:
        gradients: of each learner, after 1, 2, ... steps, as many as its contribution has.
    """
    chosen = [gradients[one.learner][one.steps - 1] for one in merge]
    merged, *_ = merge_fragment(chosen, [one.weight for one in merge], rule, averaged)
    return torch.cat([merged[name].flatten() for name in sorted(merged)])


class Moments:
    """Means and squares of one kind's merges at one Θ, by draw; kinds that share draws compare.

    Products of means are taken between different draws only, so that noise, which does not shrink
    to nothing in a mean of few draws, adds nothing to them.
    """

    def __init__(self) -> None:
        self.means: list[Tensor] = []  # of each draw, over merges
        self.squares: list[float] = []  # the same of ‖Δ‖²

    def add(self, merged: Sequence[Tensor]) -> None:
        """All merges of the next draw."""
        self.means.append(torch.stack(list(merged)).mean(dim=0))
        self.squares.append(sum(float(one.square().sum()) for one in merged) / len(merged))

    def product(self, other: Moments) -> float:
        """Of the two expected merges, without bias."""
        count = len(self.means)
        ours, theirs = torch.stack(self.means).double(), torch.stack(other.means).double()
        table = ours @ theirs.T
        return float((table.sum() - table.diagonal().sum()) / (count * (count - 1)))

    @property
    def square(self) -> float:
        """Expected ‖Δ‖² of one merge."""
        return sum(self.squares) / len(self.squares)


def compare(kinds: Sequence[Moments], references: Sequence[Moments]) -> Moved:
    """One kind beside the reference, over the Θ at which both were drawn.

    Raises:
        ValueError: the reference's mean cannot be told from none: more draws are needed.
    """
    own = sum(one.product(one) for one in kinds)
    reference = sum(one.product(one) for one in references)
    both = sum(a.product(b) for a, b in zip(kinds, references, strict=True))
    if min(own, reference) <= 0:
        raise ValueError("draws is too small: the mean merge is lost in noise; draw more")
    noise = max(0.0, sum(one.square for one in kinds) - own)
    apart = max(0.0, own + reference - 2 * both)
    return Moved(
        length=(own / reference) ** 0.5,
        cosine=both / (own * reference) ** 0.5,
        bias=(apart / reference) ** 0.5,
        spread=(noise / reference) ** 0.5,
    )


def measure_moves(
    values: Mapping[str, Any],
    checkpoints: Sequence[Path],
    kinds: Mapping[Hashable, Sequence[Merge]],
    reference: Hashable,
    *,
    draws: int,
    samples: int,
) -> dict[Hashable, Moved]:
    """How each kind of merges moves the mean update at these Θ.

    Args:
        values: configuration of the run that Θ are of; its merge rule is everyone's.
        checkpoints: of a syncer.
        kinds: merges as tapes have them; `reference` is one of them.
        draws: of every learner's outer gradients at each Θ.
        samples: merges that stand for those of a kind; all kinds see the same draws.

    Raises:
        ValueError: draws are too few to tell the reference's mean from none.
    """
    rule = resolve("merge", values["algorithm"]["merge"], MERGE_RULES)
    chosen = {kind: _sample(merges, samples) for kind, merges in kinds.items()}
    most = max(one.steps for merges in chosen.values() for merge in merges for one in merge)
    moments: dict[Hashable, list[Moments]] = {kind: [] for kind in kinds}
    for path in checkpoints:
        checkpoint = read_checkpoint(path)
        drawn = {
            str(learner): draw_gradients(
                values, checkpoint.parameters, learner, draws=draws, most=most
            )
            for learner in range(values["learners"])
        }
        for kind, merges in chosen.items():
            moments[kind].append(Moments())
            for number in range(draws):
                own = {learner: found[number] for learner, found in drawn.items()}
                averaged = checkpoint.layout.averaged
                moments[kind][-1].add([merge_drawn(one, own, rule, averaged) for one in merges])
    return {kind: compare(found, moments[reference]) for kind, found in moments.items()}


def _sample(merges: Sequence[Merge], count: int) -> list[Merge]:
    """The same ones at each call."""
    return list(merges) if len(merges) <= count else Random(0).sample(list(merges), count)
