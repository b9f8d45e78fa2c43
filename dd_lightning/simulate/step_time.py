"""How long an inner step takes in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dd_lightning.launch.step_log import STEPS, read_steps

DISTRIBUTIONS = ("constant", "normal", "lognormal", "exponential")
LEAST_SHARE = 0.05  # of the mean: no step is shorter


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of the steps of every learner, each drawn from a stream of its own.

    Args:
        mean_s: seconds of a step of a learner of speed 1.
        distribution: of the durations around the mean.
        jitter: their standard deviation, as a share of the mean.
        speeds: relative, learner k takes entry k modulo their number; 0.5 takes twice as long.
        trace: measured durations in seconds, one a line, replayed in a circle (each learner starts
            elsewhere) instead of the distribution.
        traces: of each learner its own, from its first step on; learner k takes entry k modulo
            their number.

    Raises:
        ValueError: a value out of its range, or a trace that cannot be read.
    """

    mean_s: float = 0.05
    distribution: str = "constant"
    jitter: float = 0.0
    speeds: tuple[float, ...] = (1.0,)
    trace: tuple[float, ...] = ()
    traces: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.mean_s < math.inf:
            raise ValueError(f"simulate.step_s is {self.mean_s!r}; allowed: seconds above 0.")
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"simulate.distribution is {self.distribution!r}; allowed: "
                f"{' | '.join(DISTRIBUTIONS)}."
            )
        if not 0 <= self.jitter < 1:
            raise ValueError(f"simulate.jitter is {self.jitter!r}; allowed: 0 to below 1.")
        if not self.speeds or not all(0 < speed < math.inf for speed in self.speeds):
            raise ValueError(f"simulate.speeds is {self.speeds!r}; allowed: numbers above 0.")
        measured = self.trace or self.traces
        if self.distribution == "constant" and self.jitter and not measured:
            raise ValueError(
                f"simulate.jitter is {self.jitter}, which has no effect under "
                "distribution=constant; choose normal, lognormal or exponential."
            )

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> StepTimes:
        """From the group `simulate` of the configuration.

        Raises:
            ValueError: a setting has a wrong type or value, or a trace cannot be read.
        """
        for name in ("step_s", "jitter"):
            if not _is_number(values[name]):
                raise ValueError(f"simulate.{name} is {values[name]!r}; allowed: a number.")
        speeds, trace = values.get("speeds"), values.get("trace")
        is_list = isinstance(speeds, Sequence) and not isinstance(speeds, str)
        if speeds is not None and not (is_list and speeds and all(map(_is_number, speeds))):
            raise ValueError(
                f"simulate.speeds is {speeds!r}; allowed: null or a list of numbers, as [1, 0.85]."
            )
        if trace is not None and not (isinstance(trace, str) and trace):
            raise ValueError(
                f"simulate.trace is {trace!r}; allowed: null, a file of seconds, or a run's folder."
            )
        of_run = trace is not None and Path(trace).is_dir()
        return cls(
            mean_s=values["step_s"],
            distribution=values["distribution"],
            jitter=values["jitter"],
            speeds=(1.0,) if speeds is None else tuple(speeds),
            trace=_read(trace) if trace and not of_run else (),
            traces=_read_run(Path(trace)) if of_run else (),
        )

    def of(self, learner: int, seed: int) -> Iterator[float]:
        """Endless durations of one learner; the same for the same seed."""
        speed = self.speeds[learner % len(self.speeds)]
        rng = Random(f"{seed}:step:{learner}")
        own = self.traces[learner % len(self.traces)] if self.traces else self.trace
        position = rng.randrange(len(own)) if self.trace else 0
        while True:
            if own:
                yield own[position] / speed
                position = (position + 1) % len(own)
            else:
                yield max(LEAST_SHARE, self._relative(rng)) * self.mean_s / speed

    def least_s(self, learners: int) -> float:
        """No step of so many learners is shorter; 0 where the draws or a trace decide."""
        if self.trace or self.traces or self.distribution != "constant":
            return 0.0
        fastest = max(self.speeds[index % len(self.speeds)] for index in range(learners))
        return self.mean_s / fastest

    def _relative(self, rng: Random) -> float:
        """One duration as a share of the mean."""
        if self.distribution == "normal":
            return rng.gauss(1.0, self.jitter)
        if self.distribution == "lognormal":
            sigma = math.sqrt(math.log1p(self.jitter**2))
            return rng.lognormvariate(-(sigma**2) / 2, sigma)
        if self.distribution == "exponential":  # a fixed part, and a tail of the asked deviation
            return 1 - self.jitter + (rng.expovariate(1 / self.jitter) if self.jitter else 0.0)
        return 1.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(path: str) -> tuple[float, ...]:
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"simulate.trace is {path!r}; allowed: a file of seconds, one a line, or the folder of "
            "a run with launcher.step_log=true."
        )
    try:
        found = tuple(float(line) for line in file.read_text().split())
    except ValueError as error:
        raise ValueError(
            f"simulate.trace {file.name}: {error}; give seconds, one a line."
        ) from None
    if not found or not all(0 < value < math.inf for value in found):
        raise ValueError(f"simulate.trace {file.name}: allowed: at least one, all seconds above 0.")
    return found


def _read_run(folder: Path) -> tuple[tuple[float, ...], ...]:
    """The steps that each learner of a run has logged, boundaries included."""
    files = list((folder / "learners").glob(f"*/{STEPS}"))
    if not files:
        raise ValueError(
            f"simulate.trace is {str(folder)!r}, a folder without learners/*/{STEPS}; allowed: "
            "that of a run with launcher.step_log=true, or a file of seconds, one a line."
        )
    files.sort(key=lambda file: (len(file.parent.name), file.parent.name))  # 2 before 10
    lives = [read_steps(file.parent) for file in files]
    found = tuple(tuple(step.seconds for life in own for step in life) for own in lives)
    if not all(found):
        raise ValueError(f"simulate.trace {folder.name}: a learner has logged no step.")
    return found
