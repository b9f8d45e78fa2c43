"""Merging of buffers (running statistics): weighted means, outside the outer optimizer."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dd_lightning.algorithm.gradients import compute_dtype
from dd_lightning.algorithm.merge import drop_weightless, weighted_average

_MEAN, _VAR = "running_mean", "running_var"


def running_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the (mean, variance) names of every running_mean that has a running_var beside it."""
    known = set(names)
    means = sorted(name for name in known if name.split(".")[-1] == _MEAN)
    pairs = [(mean, mean.removesuffix(_MEAN) + _VAR) for mean in means]
    return [pair for pair in pairs if pair[1] in known]


def merge_buffers(
    contributions: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    pairs: Sequence[tuple[str, str]] = (),
) -> dict[str, Tensor]:
    """Return the merged value of every buffer that a contribution of positive weight holds.

    Args:
        contributions: buffer values by name (a learner sends only those that have changed),
            ascending in (learner id, generation).
        weights: one for each, as for parameters.
        pairs: (mean, variance) names, see `running_pairs`: the variance becomes that of the
            mixture, sum(w * (var + mean^2)) / sum(w) - mean^2, over the learners that sent both
            (a plain mean where none did).

    Returns:
        Values by name, float32 (float64 where an input is); a buffer that one learner sent is an
        exact copy of it.

    Raises:
        ValueError: shapes differ, or weights as in `weighted_average`.
    """
    contributions, weights = drop_weightless(contributions, weights)
    sources = list(zip(contributions, weights, strict=True))
    merged: dict[str, Tensor] = {}
    for name in sorted({name for contribution in contributions for name in contribution}):
        senders = [(values[name], weight) for values, weight in sources if name in values]
        merged[name] = weighted_average(*zip(*senders, strict=True)).clone()
    for mean_name, var_name in pairs:
        both = [(c, w) for c, w in sources if mean_name in c and var_name in c]
        if len(both) > 1:
            means = [values[mean_name] for values, _ in both]
            variances = [values[var_name] for values, _ in both]
            merged[var_name] = _mixture_variance(means, variances, [w for _, w in both])
        elif both:
            variance = both[0][0][var_name]
            merged[var_name] = variance.to(compute_dtype(variance), copy=True)
    return merged


def _mixture_variance(means: list[Tensor], variances: list[Tensor], weights: list[float]) -> Tensor:
    dtype = compute_dtype(*means, *variances)
    wide = [mean.to(torch.float64) for mean in means]
    centre = weighted_average(wide, weights)
    # the same mixture around the common mean: no difference of large squares, never below 0
    spread = [
        variance.to(torch.float64) + (mean - centre).square()
        for mean, variance in zip(wide, variances, strict=True)
    ]
    return weighted_average(spread, weights).to(dtype)
