"""What a fleet of chips is like: one set of parameters for every row of the goodput table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dd_lightning.simulate.recovery_time import ExponentiatedWeibull

YEAR_S = 365.25 * 86400
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class FleetParameters:
    """Calibrated on the two one-learner rows of the paper's table; rows of several learners are
    predictions.

    Args:
        mtbi_years: mean time between interruptions of one chip.
        slice_chips: chips that fail and return together.
        downscale_s: dead time in which a learner goes on without a failed slice; failures in it
            are absorbed: they cost no dead time of their own.
        upscale_s: dead time in which returned slices join again.
        upscale_batch_s: returned slices wait so long for others to join together with them.
        step_s: of a learner; a failure loses the step in progress, which lowers goodput and not
            uptime: its chips computed.
        recovery: of a failed slice. A learner without elasticity waits for it.
        speed_jitter: standard deviation of a learner's speed from round to round, as a share.
        days: simulated.

    Raises:
        ValueError: a parameter out of range.
    """

    mtbi_years: float = 1.0
    slice_chips: int = 64
    downscale_s: float = 10.0
    upscale_s: float = 24.0
    upscale_batch_s: float = 150.0
    step_s: float = 5.0
    recovery: ExponentiatedWeibull = field(default_factory=lambda: ExponentiatedWeibull(33.0))
    speed_jitter: float = 0.1
    days: float = 10.0

    def __post_init__(self) -> None:
        for name in ("mtbi_years", "days", "slice_chips"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: above 0.")
        for name in ("downscale_s", "upscale_s", "upscale_batch_s", "step_s", "speed_jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: 0 or more.")

    @property
    def failures_per_chip_s(self) -> float:
        """Interruptions of one chip per second."""
        return 1 / (self.mtbi_years * YEAR_S)

    @property
    def seconds(self) -> float:
        """Length of the simulation."""
        return self.days * DAY_S

    def in_progress_s(self, computed_s: float) -> float:
        """What of `computed_s` since the last dead time belongs to an unfinished step."""
        return computed_s % self.step_s if self.step_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)
