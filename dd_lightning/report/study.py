"""A study: the runs of a multirun, grouped by the settings that were swept, averaged over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dd_lightning.report.read import SUMMARY, read_events
from dd_lightning.report.study_measures import COSTS, LOSS, Measured, StudyFacts, measure_of
from dd_lightning.report.study_plan import StudyPlan

CONFIG = "config.yaml"
OVERRIDES = Path(".hydra") / "overrides.yaml"
JOB = "job.json"  # what `launch.sweep` records of a job
SEED = "seed"
UNSET = "default"


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run: what was set for it alone, what came of it."""

    folder: Path
    given: Mapping[str, Any]  # Hydra's overrides of this job, by dotted name
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    facts: StudyFacts

    def setting(self, name: str) -> Any:
        """What a swept setting was in this run, also where it was not set for it."""
        if name in self.given:
            return self.given[name]
        found: Any = self.config
        for key in name.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return UNSET
            found = found[key]
        return UNSET if isinstance(found, Mapping) else found


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one measure over the seeds of a group; `std` is the sample's, None for one value."""

    count: int
    mean: float
    std: float | None
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without a value."""
        if not values:
            return None
        std = statistics.stdev(values) if len(values) > 1 else None
        return cls(len(values), statistics.fmean(values), std, min(values), max(values))


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their seed only; those that did not finish are counted, not averaged."""

    settings: Mapping[str, Any]
    runs: tuple[StudyRun, ...]
    unfinished: int
    values: Mapping[str, tuple[float | None, ...]]  # of each measure, by run
    measures: Mapping[str, Spread | None]


@dataclass(frozen=True, slots=True)
class Study:
    """All groups, in the order in which the sweep made them."""

    plan: StudyPlan
    swept: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def x(self) -> str | None:
        """The setting on the horizontal axis; None where nothing was swept."""
        if self.plan.x is not None:
            return self.plan.x
        return self.swept[0] if self.swept else None

    @property
    def columns(self) -> tuple[str, ...]:
        """Measures of CSV and JSON: those asked for, loss and what it cost."""
        return tuple(dict.fromkeys((*self.plan.measures, LOSS, *COSTS)))

    def line_of(self, group: Group) -> str:
        """Which line of a figure the group is on: the values of all settings but `x`."""
        if self.plan.lines is not None:
            return str(group.settings.get(self.plan.lines, UNSET))
        others = [name for name in self.swept if name != self.x]
        return ", ".join(f"{short(name)} {group.settings[name]}" for name in others)


def titles(settings: Sequence[str]) -> list[str]:
    """Each in short, but whole where two would be the same (`arm`, `study.arm`)."""
    names = [short(setting) for setting in settings]
    pairs = zip(settings, names, strict=True)
    return [setting if names.count(name) > 1 else name for setting, name in pairs]


def short(setting: str) -> str:
    """`algorithm.merge` as `merge`."""
    return setting.rpartition(".")[2]


def read_study(folders: Iterable[Path]) -> Study:
    """Read the runs of a multirun.

    Raises:
        ValueError: fewer than two runs, one that Hydra keeps no record of, or a wrong `study`.
    """
    runs = sorted((_read_run(folder) for folder in folders), key=_job_order)
    if len(runs) < 2:
        raise ValueError("a study needs two runs or more; give the folder of a multirun.")
    plan = StudyPlan.load(runs[0].config.get("study"))
    swept = swept_settings(runs)
    equal = _equal_tokens(runs)
    found: dict[tuple[str, ...], list[StudyRun]] = {}
    for run in runs:
        found.setdefault(tuple(repr(run.setting(name)) for name in swept), []).append(run)
    groups = tuple(_group(alike, swept, plan, equal) for alike in found.values())
    return Study(plan, swept, groups)


def swept_settings(runs: Sequence[StudyRun]) -> tuple[str, ...]:
    """Names that were set to different values in different runs, without the seed."""
    names = dict.fromkeys(name for run in runs for name in run.given)
    return tuple(
        name
        for name in names
        if name != SEED and len({repr(run.setting(name)) for run in runs}) > 1
    )


def _group(
    alike: Sequence[StudyRun], swept: Sequence[str], plan: StudyPlan, equal: float | None
) -> Group:
    finished = tuple(run for run in alike if run.summary["status"] == "finished")
    measured = [
        Measured(run.summary, run.facts, plan.target_loss, plan.target_tokens, equal, run.folder)
        for run in finished
    ]
    names = dict.fromkeys((*plan.measures, *plan.drawn, LOSS, *COSTS))
    values = {name: tuple(measure_of(name).of(run) for run in measured) for name in names}
    spreads = {
        name: Spread.of([value for value in found if value is not None])
        for name, found in values.items()
    }
    shown = dict.fromkeys((*swept, *(name for name in (plan.x, plan.lines) if name)))
    settings = {name: alike[0].setting(name) for name in shown}
    return Group(settings, finished, len(alike) - len(finished), values, spreads)


def _equal_tokens(runs: Sequence[StudyRun]) -> float | None:
    """What every finished run had merged at its last evaluation."""
    lasts = []
    for run in runs:
        known = [one.tokens for one in run.facts.evaluated if one.tokens is not None]
        if run.summary["status"] == "finished" and known:
            lasts.append(max(known))
    return min(lasts, default=None)


def recorded_overrides(folder: Path) -> list[str] | None:
    """What was set for this job: as the sweep recorded it, else as Hydra did at the last start of a
    run in this folder, which may have been one that only went on with it. None: nobody did."""
    if (folder / JOB).is_file():
        return [str(line) for line in json.loads((folder / JOB).read_text())["overrides"]]
    if (folder / OVERRIDES).is_file():
        return [str(line) for line in yaml.safe_load((folder / OVERRIDES).read_text()) or []]
    return None


def _read_run(folder: Path) -> StudyRun:
    lines = recorded_overrides(folder)
    if lines is None:
        raise ValueError(
            f"{folder} holds no {OVERRIDES}: what was swept is not known. Give the folder of a "
            "multirun of `dd-lightning launch`."
        )
    given = {}
    for line in lines:
        name, _, value = line.lstrip("+~").partition("=")
        given[name] = yaml.safe_load(value) if value else value
    facts = StudyFacts()
    for event in read_events(folder):
        facts.feed(event)
    config = yaml.safe_load((folder / CONFIG).read_text())
    return StudyRun(folder, given, config, json.loads((folder / SUMMARY).read_text()), facts)


def _job_order(run: StudyRun) -> tuple[str, int, str]:
    """Jobs 0, 1, ... 10 of a sweep by their number."""
    name = run.folder.name
    return str(run.folder.parent), int(name) if name.isdecimal() else 0, name
