"""What a finished run returns to its sweeper: one measure, or several, of those studies have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dd_lightning.report.read import SUMMARY, read_events
from dd_lightning.report.study_measures import (
    MEASURES,
    Measured,
    StudyFacts,
    find_measure,
    measure_of,
)
from dd_lightning.report.study_plan import TARGETS, StudyPlan, hint

DEFAULT = "validation_loss"
OF_A_STUDY = ("loss_at_equal_tokens",)  # one run alone does not have it


def check_objective(given: Any, plan: StudyPlan) -> tuple[str, ...]:
    """The names of the measures.

    Raises:
        ValueError: not a measure of a run, one that lacks its target, or no list of them.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names:
        raise ValueError(f"objective is {given!r}; allowed: a measure, or a list of some.")
    for name in names:
        known = isinstance(name, str) and name not in OF_A_STUDY
        if not known or find_measure(name) is None:
            allowed = [one for one in MEASURES if one not in OF_A_STUDY]
            raise ValueError(
                f"objective is {name!r}; allowed: {', '.join(allowed)}, metrics.NAME."
                + hint(str(name), allowed)
            )
        if name in TARGETS and getattr(plan, TARGETS[name]) is None:
            raise ValueError(
                f"study.{TARGETS[name]} is null, but objective is {name}; give the value whose "
                "time is asked for."
            )
    return tuple(names)


def objective_of(folder: Path, values: Mapping[str, Any]) -> Any:
    """Of the run in `folder`, by its configuration's `objective`: a number, or a list of some.

    None stands where nothing was measured.
    """
    given = values.get("objective", DEFAULT)
    facts, plan = StudyFacts(), StudyPlan.load(values.get("study"))
    names = check_objective(given, plan)
    for event in read_events(folder) if names != (DEFAULT,) else ():
        facts.feed(event)
    summary = json.loads((folder / SUMMARY).read_text())
    run = Measured(summary, facts, plan.target_loss, plan.target_tokens, folder=folder)
    found = [measure_of(name).of(run) for name in names]
    return found[0] if isinstance(given, str) else found
