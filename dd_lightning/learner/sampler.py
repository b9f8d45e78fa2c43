"""Which samples a learner sees, where the sampler is Lightning's (`DistributedSampler`).

`seed` (default): every learner goes through all samples, in an order of its own. `shard`: learners
go through disjoint parts. `none`: as if it were alone. One planned learner is left alone anyhow.
"""

from __future__ import annotations

from typing import Any

MODES = ("seed", "shard", "none")


def check_mode(mode: str) -> str:
    """Raises ValueError for an unknown mode."""
    if mode not in MODES:
        raise ValueError(
            f"data is {mode!r}; allowed: {' | '.join(MODES)}. Use seed for an order of its own per "
            "learner, shard for disjoint parts, none to leave the sampler alone."
        )
    return mode


def sampler_kwargs(
    inner: dict[str, Any], mode: str, *, training: bool, slot: int, slots: int, seed: int
) -> dict[str, Any]:
    """Arguments of `DistributedSampler` for this learner; validation is the same for all.

    Args:
        inner: those of the inner strategy (num_replicas and rank inside the learner).
        slot: data slot of the learner, of `slots` in the run.
        seed: of the run.
    """
    if mode == "none" or not training:
        return inner
    if mode == "shard":
        ranks = inner["num_replicas"]
        return {
            **inner,
            "num_replicas": ranks * slots,
            "rank": slot * ranks + inner["rank"],
            "seed": seed,
        }
    # slots are far fewer than the stride, so no two learners of neighbouring seeds share an order
    return {**inner, "seed": seed + 100_003 * (slot + 1)}
