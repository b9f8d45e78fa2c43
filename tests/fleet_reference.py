"""A slow reference of the fleet simulation: each chip has a clock, time ticks by seconds.

Shares no code with `dd_lightning.simulate`; recoveries are exponential.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

TICK_S = 1.0


@dataclass
class Chips:
    """One learner; `mean_life_s` of a chip, the rest as `FleetParameters`."""

    chips: int
    slice_chips: int
    mean_life_s: float
    downscale_s: float
    upscale_s: float
    upscale_batch_s: float
    step_s: float
    recovery_s: float
    rng: Random
    elastic: bool = True
    back_at: dict[int, float] = field(default_factory=dict)  # by slice that is away
    ready: set[int] = field(default_factory=set)  # slices that are back and wait to join
    upscale_at: float | None = None
    dead_until: float = 0.0
    since: float = 0.0
    good_s: float = 0.0

    def __post_init__(self) -> None:
        self.fails_at = [self._life() for _ in range(self.chips)]
        self.soonest = min(self.fails_at)

    def _life(self) -> float:
        return self.rng.expovariate(1 / self.mean_life_s)

    def _struck(self, now: float) -> bool:
        """Chips whose time has come take their slice away, if it is there."""
        if now < self.soonest:
            return False
        struck = False
        for chip in range(self.chips):
            if self.fails_at[chip] > now:
                continue
            self.fails_at[chip] = now + self._life()
            which = chip // self.slice_chips
            if which not in self.back_at and which not in self.ready:
                self.back_at[which] = now + self.rng.expovariate(1 / self.recovery_s)
                struck = True
        self.soonest = min(self.fails_at)
        return struck

    def tick(self, now: float) -> bool:
        """One second; whether the learner computes in it."""
        return self._tick_elastic(now) if self.elastic else self._tick_rigid(now)

    def _tick_elastic(self, now: float) -> bool:
        struck = self._struck(now)
        for which in [s for s, at in self.back_at.items() if at <= now]:
            del self.back_at[which]
            self.ready.add(which)
            if self.upscale_at is None:
                self.upscale_at = now + self.upscale_batch_s
        if now < self.dead_until:
            return False
        if struck:
            self._lose_step(now)
            self.dead_until = self.since = now + self.downscale_s
            return False
        if self.upscale_at is not None and now >= self.upscale_at:
            self.ready.clear()
            self.upscale_at = None
            self.dead_until = self.since = now + self.upscale_s
            return False
        away = len(self.back_at) + len(self.ready)
        self.good_s += TICK_S * (1 - away * self.slice_chips / self.chips)
        return True

    def _tick_rigid(self, now: float) -> bool:
        if now < self.dead_until:  # chips that stand still do not fail
            self.fails_at = [at + TICK_S for at in self.fails_at]
            self.soonest += TICK_S
            return False
        if self._struck(now):
            self._lose_step(now)
            wait = self.downscale_s + max(self.back_at.values()) - now + self.upscale_s
            self.back_at.clear()
            self.dead_until = self.since = now + wait
            return False
        self.good_s += TICK_S
        return True

    def _lose_step(self, now: float) -> None:
        if self.step_s:
            away = len(self.back_at) + len(self.ready) - 1  # before this failure, mostly
            share = 1 - max(0, away) * self.slice_chips / self.chips
            self.good_s -= ((now - self.since) % self.step_s) * share


def play(learners: list[Chips], seconds: float) -> tuple[float, float]:
    """(goodput, uptime) in percent."""
    up = 0
    ticks = int(seconds / TICK_S)
    for tick in range(ticks):
        computing = [learner.tick(tick * TICK_S) for learner in learners]
        up += any(computing)
    good_s = sum(learner.good_s for learner in learners)
    return 100 * good_s / (ticks * TICK_S * len(learners)), 100 * up / ticks
