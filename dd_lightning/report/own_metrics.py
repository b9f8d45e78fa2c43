"""What learners logged of their own weights, read from the `metrics.csv` of Lightning's logger."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

FILES = "csv/version_*/metrics.csv"  # below learners/<id>; a new version for each life


def learners_mean(run_dir: Path, metric: str) -> float | None:
    """Mean over learners of the last value that each logged; None unless every one did."""
    found = [_last(folder, metric) for folder in sorted((run_dir / "learners").glob("*"))]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def _last(learner_dir: Path, metric: str) -> float | None:
    """Of the newest life that logged it; finite values only."""
    versions = sorted(learner_dir.glob(FILES), key=lambda file: int(file.parent.name[8:]))
    for file in reversed(versions):
        with open(file, newline="") as lines:
            said = [row[metric] for row in csv.DictReader(lines) if row.get(metric)]
        values = [value for value in map(float, said) if math.isfinite(value)]
        if values:
            return values[-1]
    return None
