"""From the folders of a multirun to the files of its study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dd_lightning.report.read import FIGURES
from dd_lightning.report.study import read_study
from dd_lightning.report.study_figures import write_study_figures
from dd_lightning.report.study_page import render_study
from dd_lightning.report.study_table import as_json, groups_csv, markdown, runs_csv
from dd_lightning.report.summary import write_atomically

TABLE, GROUPS, RUNS, PAGE = "study.md", "study.csv", "study_runs.csv", "study.html"


@dataclass(frozen=True, slots=True)
class StudyReport:
    """What was written, and the same to print."""

    table: str
    json: dict[str, Any]
    files: tuple[Path, ...]


def report_study(folder: Path, runs: Sequence[Path]) -> StudyReport:
    """Write `study.html`, `.md`, `.csv`, `study_runs.csv` and `figures/` into a multirun's folder.

    Raises:
        ValueError: settings that are not on record, or a wrong `study` in the configuration.
        ImportError: matplotlib is missing (the tables are written before).
    """
    study = read_study(runs)
    table = markdown(study)
    texts = {TABLE: table, GROUPS: groups_csv(study), RUNS: runs_csv(study)}
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    figures = write_study_figures(folder / FIGURES, study)
    write_atomically(folder / PAGE, render_study(study, folder, figures).encode())
    files = (*(folder / name for name in (PAGE, *texts)), *figures)
    return StudyReport(table, as_json(study), files)
