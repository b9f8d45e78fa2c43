"""How long a failed slice stays away: the exponentiated Weibull distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

QUANTILES = 100_000  # of the numerical mean
DRAWN = 4096  # random numbers drawn at once


@dataclass(frozen=True, slots=True)
class ExponentiatedWeibull:
    """F(x) = (1 − exp(−(x/scale)^c))^a, given by its mean (paper, systems section; its parameters
    are not published, these are ours).

    Args:
        mean_s: seconds; `scale` follows from it.
        a: exponent of the distribution function; 1 is the Weibull distribution.
        c: shape; below 1 the tail is longer than an exponential's.

    Raises:
        ValueError: a parameter that is not above 0.
    """

    mean_s: float
    a: float = 2.0
    c: float = 0.8

    def __post_init__(self) -> None:
        for name in ("mean_s", "a", "c"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"recovery {name} is {value!r}; allowed: a number above 0.")

    @property
    def scale_s(self) -> float:
        """Scale in seconds, from the mean of the unit distribution at many quantiles."""
        quantiles = (np.arange(QUANTILES) + 0.5) / QUANTILES
        return self.mean_s / float(self._unit(quantiles).mean())

    def _unit(self, probability: np.ndarray) -> np.ndarray:
        return (-np.log1p(-(probability ** (1 / self.a)))) ** (1 / self.c)

    def draws(self, rng: np.random.Generator) -> Iterator[float]:
        """Endless independent draws, seconds."""
        scale = self.scale_s
        while True:
            yield from (scale * self._unit(rng.random(DRAWN))).tolist()


def exponential_gaps(rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    """Endless gaps of a Poisson process, seconds."""
    while True:
        yield from (rng.exponential(1 / rate_per_s, DRAWN)).tolist()
