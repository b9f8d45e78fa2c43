"""What the run sent, beside what data-parallel training of the same steps would have sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMULA = "Σ over learners of steps × 2·(M − 1)/M × parameters × 4 bytes (ring all-reduce, float32)"
BYTES_PER_PARAMETER = 4


def data_parallel_bytes(steps: list[int], parameters: int) -> int:
    """Bytes that ring all-reduces of float32 gradients would have moved, one at each step.

    Args:
        steps: inner steps of each of the M learners.
        parameters: number of trainable elements.
    """
    learners = max(1, len(steps))
    return sum(steps) * 2 * (learners - 1) * parameters * BYTES_PER_PARAMETER // learners


def compare_bytes(summary: Mapping[str, Any], parameters: int) -> dict[str, float | None]:
    """`sent` (up and down), `data_parallel` and their `ratio` (None where one is zero)."""
    sent = summary["bytes"]["up"] + summary["bytes"]["down"]
    steps = [learner["steps"] for learner in summary["per_learner"].values()]
    other = data_parallel_bytes(steps, parameters)
    return {
        "sent": sent,
        "data_parallel": other,
        "ratio": other / sent if sent and other else None,
    }


def format_bytes(count: float) -> str:
    """With a binary unit and three digits: `1.25 GiB`."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(count) < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
