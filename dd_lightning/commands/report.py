"""`dd-lightning report RUN|MULTIRUN`: summary.json, figures and report.html from the tape."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dd_lightning.report.read import SUMMARY, report_run, runs_in


def main(argv: list[str]) -> int:
    """Write the report of each run found; print where it is, or (--json) the summaries.

    Raises:
        ValueError: no run there, or a tape that cannot be read.
    """
    parser = argparse.ArgumentParser(prog="dd-lightning report", description=__doc__)
    parser.add_argument("folder", type=Path, help="a run folder, or one with runs below it")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object: summaries by run folder"
    )
    arguments = parser.parse_args(argv)
    summaries = {}
    for run in runs_in(arguments.folder):
        page = report_run(run)
        summary = json.loads((run / SUMMARY).read_text())
        summaries[str(run)] = summary
        if not arguments.json:
            loss = summary["loss"]["validation"]
            measured = "not measured" if loss is None else f"{loss:.4f}"
            print(f"{page}: {summary['status']}, validation loss {measured}")
    if arguments.json:
        print(json.dumps(summaries, indent=1, allow_nan=False))
    return 0
