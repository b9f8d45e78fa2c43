"""`dd-lightning report RUN|MULTIRUN`: summary.json, figures and report.html from the tape.

Of a multirun also study.html, study.md, study.csv, study_runs.csv and figures/: the runs grouped
by the settings that were swept, mean and spread over the seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dd_lightning.commands.parsing import OneLineParser
from dd_lightning.report.read import PAGE, SUMMARY, TAPE, report_run, runs_in
from dd_lightning.report.study import OVERRIDES, recorded_overrides
from dd_lightning.report.study_report import StudyReport, report_study


def main(argv: list[str]) -> int:
    """Write the report of each run found, then of the study they make; print it, or (--json) all.

    Raises:
        ValueError: no run there, or a tape that cannot be read.
    """
    parser = OneLineParser(prog="dd-lightning report", description=__doc__)
    parser.add_argument("folder", type=Path, help="a run folder, or one with runs below it")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: summaries by run folder, the study"
    )
    arguments = parser.parse_args(argv)
    runs = runs_in(arguments.folder)
    summaries = {}
    for run in runs:
        alone = len(runs) == 1
        page = report_run(run) if alone or _outdated(run) else run / PAGE
        summary = json.loads((run / SUMMARY).read_text())
        summaries[str(run)] = summary
        if not arguments.json:
            loss = summary["loss"]["validation"]
            measured = "not measured" if loss is None else f"{loss:.4f}"
            print(f"{page}: {summary['status']}, validation loss {measured}")
    recorded = all(recorded_overrides(run) is not None for run in runs)
    if len(runs) > 1 and not recorded:
        print(f"no study: not every run has {OVERRIDES}, by which to group them", file=sys.stderr)
    swept = len(runs) > 1 and recorded
    study = report_study(arguments.folder, runs) if swept else None
    if arguments.json:
        print(json.dumps(_found(summaries, study), indent=1, allow_nan=False))
    elif study is not None:
        print(f"\n{study.table}\n" + "\n".join(str(file) for file in study.files))
    return 0


def _outdated(run: Path) -> bool:
    """Whether the run's page is missing, or older than its tape."""
    page = run / PAGE
    return not page.is_file() or page.stat().st_mtime < (run / TAPE).stat().st_mtime


def _found(summaries: dict, study: StudyReport | None) -> dict:
    """Of a multirun `runs` and `study`; else summaries by folder."""
    return summaries if study is None else {"runs": summaries, "study": study.json}
