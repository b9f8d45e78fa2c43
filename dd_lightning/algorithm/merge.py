"""Merging: many learners' outer gradients of one fragment into one.

Sums run over contributions in the order given (the caller sorts by learner id and generation) with
float64 accumulators, tensors in name order, so a result does not depend on order of arrival.
Non-finite gradients are refused before a merge and are not looked for here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dd_lightning.algorithm.checks import check_int, check_number
from dd_lightning.algorithm.gradients import compute_dtype
from dd_lightning.algorithm.sums import norm, scaled_sum, sum_norm


@runtime_checkable
class MergeRule(Protocol):
    """A rule for one tensor; the `_target_` of `algorithm.merge` is a class of such objects."""

    def __call__(self, gradients: list[Tensor], weights: list[float]) -> Tensor:
        """Merge same-shaped gradients with positive weights into one of that shape."""
        ...


def weighted_average(gradients: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum(w * v) / sum(w).

    Args:
        gradients: tensors (or nested lists) of one shape.
        weights: one finite number >= 0 for each, not all 0.

    Returns:
        A tensor of that shape, float32 (float64 where an input is). With one positive weight it
        is that gradient exactly; it may then share memory with it.

    Raises:
        ValueError: nothing given, shapes differ, or a weight is negative, NaN or infinite.
    """
    gradients, weights = _positive(gradients, weights)
    dtype = compute_dtype(*gradients)
    if len(gradients) == 1:
        return gradients[0].to(dtype)
    total = sum(weights)
    return scaled_sum(gradients, weights, lambda piece: piece.div_(total), dtype)


def radial_directional_average(
    gradients: Sequence[Tensor], weights: Sequence[float], cancel_below: float = 1e-3
) -> Tensor:
    """Return the weighted mean length times the direction of the weighted mean direction (RDA).

    (sum(w * |v|) / sum(w)) * phi(sum(w * phi(v)) / sum(w)) with phi(x) = x / |x|, phi(0) = 0: the
    average of M orthogonal unit vectors has length 1/sqrt(M), this keeps 1. A zero v keeps its
    weight in the length. Arguments, result and errors as in `weighted_average`.

    Args:
        cancel_below: when the mean direction is shorter than this, directions cancel and the
            result is the weighted average (our choice, not the paper's).
    """
    return _directional(*_positive(gradients, weights), cancel_below)[0]


def agreement(gradients: Sequence[Tensor], weights: Sequence[float]) -> float:
    """Return |sum(w * phi(v))| / sum(w): 1 where all point the same way, 0 where they cancel.

    Raises:
        ValueError: as `weighted_average`.
    """
    gradients, weights = _positive(gradients, weights)
    return Directions.of(gradients, weights).agreement


@dataclass(frozen=True, slots=True)
class Average:
    """Merge rule `average`: the weighted average."""

    def __call__(self, gradients: list[Tensor], weights: list[float]) -> Tensor:
        return weighted_average(gradients, weights)


@dataclass(frozen=True, slots=True)
class RadialDirectional:
    """Merge rule `rda`; small tensors, whose direction is a coin toss, are averaged.

    Args:
        min_numel: tensors of fewer elements are averaged.
        cancel_below: as in `radial_directional_average`.
    """

    min_numel: int = 16
    cancel_below: float = 1e-3

    def __post_init__(self) -> None:
        check_int("merge.min_numel", self.min_numel, 0)
        check_number("merge.cancel_below", self.cancel_below, 0, 1)

    def __call__(self, gradients: list[Tensor], weights: list[float]) -> Tensor:
        return self.merge_and_compare(gradients, weights)[0]

    def merge_and_compare(
        self, gradients: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[Tensor, "Directions"]:
        """The merged gradient and how the gradients compare, from the same passes over them."""
        gradients, weights = _positive(gradients, weights)
        if gradients[0].numel() < self.min_numel:
            return weighted_average(gradients, weights), Directions.of(gradients, weights)
        return _directional(gradients, weights, self.cancel_below)


MERGE_RULES: dict[str, type] = {"rda": RadialDirectional, "average": Average}


def merge_fragment(
    contributions: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    rule: MergeRule,
    average_names: frozenset[str] = frozenset(),
) -> tuple[dict[str, Tensor], float, float | None]:
    """Merge the contributions of a round, tensor by tensor in name order.

    Args:
        contributions: outer gradients by name, ascending in (learner id, generation).
        weights: one for each; contributions of weight 0 are dropped.
        rule: for every tensor but those in `average_names`, which are averaged. A rule is not
            asked where only one contribution is left: the result is that one.

    Returns:
        The merged outer gradient by name; the fragment's agreement: the mean of the tensors'
        `agreement`, weighted by their numbers of elements, over the tensors that `rule` merges
        (over all where it merges none); and, so averaged, `Directions.cosine` between the
        contributions, over the tensors that have one (None: none has).

    Raises:
        ValueError: contributions name different tensors, or as `weighted_average`.
    """
    contributions, weights = drop_weightless(contributions, weights)
    names = sorted(contributions[0])
    for contribution in contributions:
        if sorted(contribution) != names:
            odd = sorted(set(contribution) ^ set(names))
            raise ValueError(f"contributions differ in the tensors {odd}; all must name the same.")
    ruled = [name for name in names if name not in average_names] or names
    merged: dict[str, Tensor] = {}
    agreed, turned, compared = 0.0, 0.0, 0
    for name in names:
        gradients, _ = _positive([c[name] for c in contributions], weights, name)
        found: Directions | None = None
        if name in average_names or len(gradients) == 1:
            merged[name] = weighted_average(gradients, weights)
        elif isinstance(rule, RadialDirectional):
            merged[name], found = rule.merge_and_compare(gradients, weights)
        else:
            merged[name] = _checked(rule(gradients, weights), gradients[0], name, rule)
        if name in ruled:
            found = found or Directions.of(gradients, weights)
            count = gradients[0].numel()
            agreed += found.agreement * count
            if (own := found.cosine) is not None:
                turned, compared = turned + own * count, compared + count
    elements = sum(contributions[0][name].numel() for name in ruled)
    cosine = turned / compared if compared else None
    return merged, agreed / elements if elements else 0.0, cosine


def _checked(result: Any, like: Tensor, name: str, rule: MergeRule) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != like.shape:
        given = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"merge rule {type(rule).__name__} returned {given} for {name}; "
            f"it must return a tensor of shape {tuple(like.shape)}."
        )
    return result


def drop_weightless(items: Sequence[Any], weights: Sequence[float]) -> tuple[list, list[float]]:
    """Check weights against `items` and drop the items of weight 0."""
    items, weights = list(items), [float(w) for w in weights]
    if not items or len(items) != len(weights):
        raise ValueError(
            f"{len(items)} contributions and {len(weights)} weights given; "
            "give at least one contribution and exactly one weight for each."
        )
    bad = [w for w in weights if not math.isfinite(w) or w < 0]
    if bad or not any(weights) or not math.isfinite(sum(weights)):
        raise ValueError(
            f"weights are {weights}; allowed: finite numbers >= 0 with a finite sum above 0. "
            "Leave out contributions without tokens, and refuse broken counters."
        )
    kept = [index for index, weight in enumerate(weights) if weight > 0]
    return [items[i] for i in kept], [weights[i] for i in kept]


def _positive(
    gradients: Sequence[Tensor], weights: Sequence[float], name: str = "gradients"
) -> tuple[list[Tensor], list[float]]:
    """Return detached gradients of one shape with positive weights, else raise ValueError."""
    tensors = [torch.as_tensor(gradient).detach() for gradient in gradients]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"{name} have shapes {sorted(shapes)}; all must have the same shape.")
    return drop_weightless(tensors, weights)


@dataclass(frozen=True, slots=True)
class Directions:
    """What a set of gradients has in common: each one's length, and that of sum(w * phi(v))."""

    norms: list[float]
    weights: list[float]
    factors: list[float]  # w / |v|, 0 for a zero v
    length: float
    agreement: float

    @classmethod
    def of(cls, gradients: list[Tensor], weights: list[float]) -> "Directions":
        """Of gradients of one shape with positive weights."""
        if len(gradients) == 1:
            agreed = 1.0 if bool(gradients[0].any()) else 0.0
            return cls([], [], [], agreed * weights[0], agreed)
        norms = [norm(gradient) for gradient in gradients]
        factors = [w / length if length else 0.0 for w, length in zip(weights, norms, strict=True)]
        length = sum_norm(gradients, factors)
        return cls(norms, weights, factors, length, length / sum(weights))

    @property
    def cosine(self) -> float | None:
        """Mean cosine over all pairs of gradients, a pair weighted by the product of its weights.

        From |sum(w * phi(v))|^2 = sum(w^2) + the sum over pairs, so it costs no further pass. A
        zero gradient has no direction and is in no pair; None without a pair.
        """
        present = [w for w, factor in zip(self.weights, self.factors, strict=True) if factor > 0]
        if len(present) < 2:
            return None
        squares = sum(w * w for w in present)
        mean = (self.length**2 - squares) / (sum(present) ** 2 - squares)
        return max(-1.0, min(1.0, mean))


def _directional(
    gradients: list[Tensor], weights: list[float], cancel_below: float
) -> tuple[Tensor, Directions]:
    """RDA of gradients that `_positive` has checked, and how they compare."""
    check_number("cancel_below", cancel_below, 0)
    found, dtype = Directions.of(gradients, weights), compute_dtype(*gradients)
    if len(gradients) == 1:
        return gradients[0].to(dtype), found
    if found.agreement < cancel_below or found.length == 0:
        return weighted_average(gradients, weights), found
    radius = sum(w * one for w, one in zip(weights, found.norms, strict=True)) / sum(weights)
    scale = radius / found.length
    merged = scaled_sum(gradients, found.factors, lambda piece: piece.mul_(scale), dtype)
    return merged, found
