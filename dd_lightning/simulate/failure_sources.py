"""Where interruptions come from: a Poisson process, or a cluster's own log."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.recovery_time import DRAWN, exponential_gaps

COLUMNS = ("time", "component", "seconds_down")

Failure = tuple[float, float, float]
"""(when, seconds until the slice is back, where: a place in the learner from 0 to 1).

It strikes nothing if its place is among the slices that are away; 1 always strikes.
"""


def poisson(
    chips: float, parameters: FleetParameters, rng: np.random.Generator
) -> Iterator[Failure]:
    """Interruptions of `chips` chips, without end."""
    gaps = exponential_gaps(chips * parameters.failures_per_chip_s, rng)
    recoveries = parameters.recovery.draws(rng)
    places = _places(np.random.default_rng(rng.integers(2**63)))
    now = 0.0
    for gap, recovery in zip(gaps, recoveries, strict=False):
        now += gap
        yield now, recovery, next(places)


def _places(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(DRAWN).tolist()


@dataclass(frozen=True, slots=True)
class FailureTrace:
    """A log of interruptions: when (seconds from its start), which component, seconds down.

    Args:
        rows: in order of time.
        seconds: from the first row's zero to the last row's end.
    """

    rows: tuple[tuple[float, str, float], ...]
    seconds: float

    @classmethod
    def read(cls, path: str | Path) -> FailureTrace:
        """From a CSV file with the columns time, component, seconds_down.

        Raises:
            ValueError: the file is missing, lacks a column, or a row makes no sense.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"--trace is {str(path)!r}; allowed: an existing CSV file.")
        rows = []
        try:
            text = path.read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"--trace {path.name} is not a text file: {error}.") from None
        reader = csv.DictReader(io.StringIO(text, newline=""))
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(
                f"--trace {path.name} lacks the columns {', '.join(missing)}; it needs a "
                f"header {','.join(COLUMNS)} (seconds, a name, seconds)."
            )
        for number, row in enumerate(reader, start=2):
            rows.append(_row(path.name, number, row))
        if not rows:
            raise ValueError(f"--trace {path.name} has no rows; give at least one failure.")
        rows.sort(key=lambda row: row[0])
        seconds = max(time + down for time, _, down in rows)
        if not seconds:
            raise ValueError(
                f"--trace {path.name} ends at 0 s; allowed: a log that takes time, since it is "
                "repeated until --days are over."
            )
        return cls(tuple(rows), seconds)

    def of_learner(self, learner: int, learners: int) -> Iterator[Failure]:
        """The failures of one learner: components are dealt out in order of name, so that each
        belongs to one learner, and the log repeats itself when it is over."""
        names = sorted({component for _, component, _ in self.rows})
        own = {name for index, name in enumerate(names) if index % learners == learner}
        mine = [(time, down) for time, component, down in self.rows if component in own]
        start = 0.0
        while mine:
            for time, down in mine:
                yield start + time, down, 1.0
            start += self.seconds


def _row(file: str, number: int, row: dict[str, str]) -> tuple[float, str, float]:
    try:
        time, down = float(row["time"]), float(row["seconds_down"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"--trace {file}, line {number}: {error}; times are in seconds.") from None
    if not (0 <= time < float("inf") and 0 <= down < float("inf")):
        raise ValueError(
            f"--trace {file}, line {number}: time {time:g}, seconds_down {down:g}; allowed: finite "
            "seconds, 0 or more."
        )
    return time, str(row["component"]), down
