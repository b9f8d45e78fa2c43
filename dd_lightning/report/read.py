"""From a run folder to its report: one pass over the tape, then summary, figures and page."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dd_lightning.protocol.tape import TapeError, read_tape
from dd_lightning.report.answer import Told
from dd_lightning.report.figures import NAMES, write_figures
from dd_lightning.report.html import TITLES, Report, render_html
from dd_lightning.report.observer import Event
from dd_lightning.report.series import Series
from dd_lightning.report.summary import STATUSES, RunReader, write_atomically, write_summary

TAPE, EVALUATIONS, SUMMARY, PAGE, FIGURES = (
    "tape.jsonl",
    "evaluations.jsonl",
    "summary.json",
    "report.html",
    "figures",
)


def report_run(run_dir: str | os.PathLike[str], status: str | None = None) -> Path:
    """Write `summary.json`, `figures/*` and `report.html` of a run; return the page's path.

    Args:
        status: finished | failed | interrupted. None: what the tape says, else what an earlier
            `summary.json` says (the launcher knows more than a tape that was cut), else "failed".

    Raises:
        ValueError: no tape there, one that cannot be read, or another `status`.
        ImportError: matplotlib is missing (summary.json is written before).
    """
    folder = Path(run_dir)
    if status is not None and status not in STATUSES:
        raise ValueError(f"status is {status!r}; allowed: {' | '.join(STATUSES)}, or None.")
    reader, series = RunReader(), Series()
    for event in read_events(folder):
        reader.feed(event)
        series.feed(event)
    summary = reader.summary(status or reader.facts.status or _earlier_status(folder))
    write_summary(folder, summary)
    figures = write_figures(folder / FIGURES, series, reader.tokens, summary)
    faults = series.faults.list()
    told = Told(
        summary=summary,
        parameters=sum(reader.tokens.elements),
        config=reader.facts.config,
        fired=Counter(fault.kind for fault in faults if fault.at_s is not None),
        longest_round_s=max((one.quorum_s + one.grace_s for one in series.merges), default=None),
    )
    report = Report(
        told,
        warnings=series.warnings,
        faults=[fault.sentence() for fault in faults],
        figures=figures,
        note=_left_out(figures) if series.steps else "",
    )
    page = folder / PAGE
    write_atomically(page, render_html(report).encode())
    return page


def _left_out(figures: Sequence[Path]) -> str:
    """Names the figures that a data-parallel run does not have."""
    drawn = {path.stem for path in figures}
    missing = ", ".join(TITLES[name] for name in NAMES if name not in drawn)
    return f"Left out, since a data-parallel run has no contributions: {missing}."


def runs_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The run folder itself, or the runs of a multirun below it, by name.

    Raises:
        ValueError: neither.
    """
    folder = Path(folder)
    if (folder / TAPE).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"**/{TAPE}"))
    if not found:
        raise ValueError(
            f"{folder} holds no {TAPE}; give the folder of a run (the one with {TAPE} in it), or "
            "of a multirun."
        )
    return found


def read_events(folder: Path) -> Iterator[Event]:
    """The tape; then the evaluator's own file, where the launcher has not put it on the tape."""
    path = folder / TAPE
    if not path.is_file():
        raise ValueError(f"{folder} holds no {TAPE}; give the folder of a run.")
    evaluated = False
    for event in read_tape(path):
        evaluated = evaluated or event["event"] == "evaluation"
        yield event
    beside = folder / EVALUATIONS
    if not evaluated and beside.is_file():
        yield from read_evaluations(beside)


def read_evaluations(path: Path) -> Iterator[Event]:
    """`evaluations.jsonl` as `evaluation` events; a torn last line is left out.

    Raises:
        TapeError: a line in the middle does not parse.
    """
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise TapeError(f"{path}, line {number} is not JSON: {error}") from error
        yield {"t_s": 0.0, "metrics": {}, **record, "event": "evaluation"}


def _earlier_status(folder: Path) -> str | None:
    path = folder / SUMMARY
    if not path.is_file():
        return None
    try:
        status = json.loads(path.read_text()).get("status")
    except (ValueError, AttributeError):
        return None  # not ours, or torn: the tape decides
    return status if status in STATUSES else None
