"""What a study with a baseline says of each group: how far its loss fell, and how far it is behind.

Spreads are sample standard deviations over the seeds; a difference to the baseline is taken seed
by seed, since runs of one seed begin from the same weights and see the same data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dd_lightning.report.observer import finite
from dd_lightning.report.study import Group, Spread, Study, StudyRun


@dataclass(frozen=True, slots=True)
class Compared:
    """A group beside the baseline of its study.

    Args:
        fell: validation loss at the start less that at the end, nats.
        fell_in_spreads: mean of `fell` in units of its spread; above 2 the group "improves".
        behind: validation loss at the end less that of the baseline's run of the same seed; None
            for the baseline itself, and without a seed in common.
    """

    fell: Spread | None
    fell_in_spreads: float | None
    behind: Spread | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def compare(study: Study) -> list[Compared]:
    """One for each group of the study, in its order; empty where it names no baseline.

    Warns where no group is the baseline: then nothing is behind it.
    """
    baseline = study.plan.baseline
    if baseline is None or study.x is None:
        return []
    if all(group.settings.get(study.x) != baseline for group in study.groups):
        given = dict.fromkeys(str(group.settings.get(study.x)) for group in study.groups)
        warnings.warn(
            f"study.baseline is {baseline!r}, but {study.x} is {', '.join(given)} in these runs: "
            "no differences to it.",
            stacklevel=2,
        )
    return [_compared(group, _baseline_of(group, study, baseline)) for group in study.groups]


def _compared(group: Group, baseline: Group | None) -> Compared:
    fell = Spread.of([value for run in group.runs if (value := _fell(run)) is not None])
    in_spreads = fell.mean / fell.std if fell is not None and fell.std else None
    behind = None
    if baseline is not None and baseline is not group:
        ours, theirs = (_by_seed(one, _validation) for one in (group, baseline))
        behind = Spread.of([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    return Compared(fell, in_spreads, behind)


def _baseline_of(group: Group, study: Study, baseline: str) -> Group | None:
    """The group that differs in `x` alone."""
    wanted = {**group.settings, study.x: baseline}
    return next((one for one in study.groups if dict(one.settings) == wanted), None)


def _by_seed(group: Group, of: Callable[[StudyRun], float | None]) -> dict[int, float]:
    found = {run.summary["seed"]: of(run) for run in group.runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _validation(run: StudyRun) -> float | None:
    return finite(run.summary["loss"]["validation"])


def _fell(run: StudyRun) -> float | None:
    initial, last = finite(run.summary["loss"]["initial"]), _validation(run)
    return None if initial is None or last is None else initial - last
