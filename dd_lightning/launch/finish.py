"""What is written once every process has ended: the rest of the tape, summary, figures, report.

The syncer's process has been the tape's writer; it is gone, so this one follows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dd_lightning.launch.evaluator import EVALUATIONS
from dd_lightning.protocol.tape import TapeWriter, read_tape
from dd_lightning.report import write_report
from dd_lightning.report.summary import summarize, write_summary

TAPE = "tape.jsonl"


def finish_run(folder: Path, status: str, draw: bool = True) -> float | None:
    """Complete the tape, write `summary.json` and (if `draw`) figures and report.

    Args:
        status: finished | failed | interrupted, as the launcher saw it: it stands on the tape where
            the syncer could not write how the run ended, or saw less than the launcher.

    Returns:
        Validation loss at the end, None where none was measured.
    """
    path = folder / TAPE
    if not path.exists():
        return None  # the syncer did not get so far; its log says why
    _complete(path, folder / EVALUATIONS, status)
    summary = summarize(read_tape(path))
    write_summary(folder, summary)
    if draw:
        write_report(folder)
    return summary["loss"]["validation"]


def _complete(path: Path, evaluations: Path, status: str) -> None:
    """Append evaluations with their checkpoint's time and tokens, then the end where it lacks."""
    checkpoints: dict[str, dict[str, Any]] = {}
    ended: dict[str, Any] = {}
    last_s = 0.0
    for event in read_tape(path):
        last_s = max(last_s, event["t_s"])
        if event["event"] == "checkpoint":
            checkpoints[event["file"]] = event
        elif event["event"] == "run_end":
            ended = event
    writer = TapeWriter(path)
    for found in _lines(evaluations):
        checkpoint = checkpoints.get(found["file"], {})
        writer.write(
            "evaluation",
            last_s,
            **found,
            checkpoint_t_s=checkpoint.get("t_s"),
            tokens_merged=checkpoint.get("tokens_merged"),
        )
    if not ended or (status != "finished" and ended["status"] != status):
        digest = ended.get("parameters_sha256")
        seconds = ended.get("seconds", last_s)
        writer.write("run_end", last_s, status=status, parameters_sha256=digest, seconds=seconds)
    writer.close()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The evaluations; a last line that the evaluator was killed in is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield json.loads(line)
