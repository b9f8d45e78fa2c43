"""A study as text: a Markdown table, CSV, and what `--json` prints."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from dd_lightning.report.study import SEED, Group, Spread, Study, titles
from dd_lightning.report.study_compare import Compared, compare
from dd_lightning.report.study_measures import measure_of

NOT_MEASURED = "–"
STATISTICS = ("mean", "std", "least", "most")


def markdown(study: Study) -> str:
    """One row a group: mean ± sample standard deviation over its runs."""
    names, compared = study.plan.measures, compare(study)
    unfinished = any(group.unfinished for group in study.groups)
    head = [*titles(study.swept), "runs", *(measure_of(name).label for name in names)]
    if compared:
        head += ["loss fell by", "in spreads", f"behind {study.plan.baseline}"]
    rows = [head + (["not finished"] if unfinished else []), ["---"] * (len(head) + unfinished)]
    for index, group in enumerate(study.groups):
        cells = [*(str(group.settings[name]) for name in study.swept), str(len(group.runs))]
        cells += [cell(name, group.measures[name], len(group.runs)) for name in names]
        cells += _compared_cells(compared[index], len(group.runs)) if compared else []
        rows.append(cells + ([str(group.unfinished)] if unfinished else []))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _compared_cells(found: Compared, runs: int) -> list[str]:
    many = NOT_MEASURED if found.fell_in_spreads is None else f"{found.fell_in_spreads:.0f}"
    fell, behind = (cell("validation_loss", one, runs) for one in (found.fell, found.behind))
    return [fell, many, behind]


def cell(name: str, spread: Spread | None, runs: int) -> str:
    """`1.6812 ± 0.0120`; without the spread where it is nothing or there is one run.

    Where the mean leaves out runs without a value (a loss not reached), it says of how many it is.
    """
    if spread is None:
        return NOT_MEASURED
    measure = measure_of(name)
    said = format(spread.mean * measure.scale, measure.form)
    if spread.std:
        said += f" ± {spread.std * measure.scale:{measure.form}}"
    if spread.count < runs:
        said += f" ({spread.count} of {runs})"
    return said


def groups_csv(study: Study) -> str:
    """One row a group: settings, number of runs, four statistics of each measure, unscaled."""
    names, compared = study.columns, compare(study)
    head = [*study.swept, "runs", "not_finished"]
    head += [f"{name}_{which}" for name in names for which in STATISTICS]
    if compared:
        head += [f"{name}_{which}" for name in ("fell", "behind") for which in STATISTICS]
    rows = [head]
    for index, group in enumerate(study.groups):
        row = [*(group.settings[name] for name in study.swept), len(group.runs), group.unfinished]
        spreads = [group.measures[name] for name in names]
        spreads += [compared[index].fell, compared[index].behind] if compared else []
        for spread in spreads:
            row += [getattr(spread, which) if spread else None for which in STATISTICS]
        rows.append(row)
    return _csv(rows)


def runs_csv(study: Study) -> str:
    """One row a finished run: its folder's name, settings, seed and measures, unscaled."""
    names = study.columns
    rows: list[list[Any]] = [["run", *study.swept, SEED, *names]]
    for group in study.groups:
        for index, run in enumerate(group.runs):
            settings = [group.settings[name] for name in study.swept]
            values = [group.values[name][index] for name in names]
            rows.append([run.folder.name, *settings, run.summary["seed"], *values])
    return _csv(rows)


def as_json(study: Study) -> dict[str, Any]:
    """`swept`, `measures` and `rows`: settings, runs, seeds and the spread of each measure.

    With a baseline each row has `compared` too, as of `study_compare.Compared`.
    """
    rows = [_row(group, study.swept, study.columns) for group in study.groups]
    for row, compared in zip(rows, compare(study), strict=False):  # none without a baseline
        row["compared"] = compared.as_json()
    return {
        "swept": list(study.swept),
        "measures": list(study.columns),
        "rows": rows,
    }


def _row(group: Group, swept: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
    spreads = {name: group.measures[name] for name in names}
    return {
        "settings": {name: group.settings[name] for name in swept},
        "runs": [str(run.folder) for run in group.runs],
        "seeds": [run.summary["seed"] for run in group.runs],
        "not_finished": group.unfinished,
        "measures": {name: asdict(found) if found else None for name, found in spreads.items()},
    }


def _csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
