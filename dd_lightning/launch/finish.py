"""What is written once every process has ended: the rest of the tape, summary, figures, report.

The syncer's process has been the tape's writer; it is gone, so this one follows it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dd_lightning.launch.finish_logs import finish_logs
from dd_lightning.protocol.tape import TapeWriter, read_tape
from dd_lightning.report.read import EVALUATIONS, SUMMARY, TAPE, read_evaluations, report_run
from dd_lightning.report.summary import summarize, write_summary

log = logging.getLogger(__name__)


def finish_run(
    folder: Path,
    status: str,
    draw: bool = True,
    events: Sequence[Mapping[str, Any]] = (),
    loggers: Mapping[str, Mapping[str, Any]] | None = None,
) -> float | None:
    """Complete the tape, write `summary.json` and (if `draw`) figures and report.

    Args:
        status: finished | failed | interrupted, as the launcher saw it: it stands on the tape where
            the syncer could not write how the run ended, or saw less than the launcher.
        events: more for the tape, whole: what chaos did.
        loggers: that get the end of the run too, with summary and figures.

    Returns:
        Validation loss at the end, None where none was measured.
    """
    path = folder / TAPE
    if not path.exists():
        return None  # the syncer did not get so far; its log says why
    _complete(path, folder / EVALUATIONS, status, events)
    if draw:
        try:
            report_run(folder)
        except ImportError as error:  # the summary is written by then
            log.warning("no figures and no report.html: %s", error)
    else:
        write_summary(folder, summarize(read_tape(path)))
    finish_logs(folder, loggers or {})
    return json.loads((folder / SUMMARY).read_text())["loss"]["validation"]


def _complete(
    path: Path, evaluations: Path, status: str, events: Sequence[Mapping[str, Any]]
) -> None:
    """Append `events`, evaluations with their checkpoint's time and tokens, and a lacking end."""
    checkpoints: dict[str, dict[str, Any]] = {}
    ended: dict[str, Any] = {}
    written: set[tuple[Any, ...]] = set()  # evaluations, by an earlier start of the run
    last_s = 0.0
    for event in read_tape(path):
        last_s = max(last_s, event["t_s"])
        if event["event"] == "checkpoint":
            checkpoints[event["file"]] = event
        elif event["event"] == "run_end":
            ended = event
        elif event["event"] == "syncer_start":
            ended = {}  # a resumed run has not ended yet
        elif event["event"] == "evaluation":
            written.add(_which(event))
    writer = TapeWriter(path)
    for event in events:
        writer.write(**event)
    for found in read_evaluations(evaluations) if evaluations.exists() else ():
        if _which(found) in written:
            continue
        checkpoint = checkpoints.get(found["file"], {})
        known = {
            "checkpoint_t_s": checkpoint.get("t_s"),
            "tokens_merged": checkpoint.get("tokens_merged"),
        }
        writer.write(**{**found, **known, "t_s": last_s})
    if not ended or (status != "finished" and ended["status"] != status):
        digest = ended.get("parameters_sha256")
        seconds = ended.get("seconds", last_s)
        writer.write("run_end", last_s, status=status, parameters_sha256=digest, seconds=seconds)
    writer.close()


def _which(evaluation: Mapping[str, Any]) -> tuple[Any, ...]:
    """One evaluation: of which checkpoint, and on what occasion."""
    return tuple(evaluation.get(name) for name in ("file", "initial", "final"))
