"""The end of a run in its loggers: what only the launcher knows, once the syncer has exited.

The syncer's process has written the run; it is gone, so this one goes on with it. A run without a
syncer (data-parallel) is written here as a whole, from its tape.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dd_lightning.launch.roles import CONFIG
from dd_lightning.protocol.tape import read_tape
from dd_lightning.report.loggers import close_logs, open_logs
from dd_lightning.report.read import FIGURES, SUMMARY, TAPE
from dd_lightning.report.run_log import STATES
from dd_lightning.syncer.run_files import read_started
from dd_lightning.syncer.telemetry import without_paths

log = logging.getLogger(__name__)

FINISH_S = 60.0  # for all loggers together; what is left then is given up, with a warning
ADDED = ("fault", "evaluation")  # what the launcher puts on a tape


def finish_logs(folder: Path, loggers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Add faults, evaluations, summary and figures; returns what was lost, in words.

    A logger that was never begun (its first process failed before) gets the whole tape.
    """
    if not loggers:
        return []
    config = without_paths(yaml.safe_load((folder / CONFIG).read_text()))
    began = read_started(folder / "syncer")
    wall_s = began.wall_s if began is not None else (folder / CONFIG).stat().st_mtime
    run_id = began.run_id if began is not None else f"{config['mode']}-{config['seed']}"
    logs = open_logs(loggers, run_id, folder, config, wall_s)
    for one in logs:
        is_begun = (folder / STATES / f"{one.name}.json").is_file()
        for event in _events(folder, ADDED if is_begun else None):
            one.event(event)
    summary = json.loads((folder / SUMMARY).read_text())
    figures = sorted((folder / FIGURES).glob("*.png"))
    return close_logs(logs, FINISH_S, summary=summary, figures=figures)


def _events(folder: Path, kinds: Iterable[str] | None) -> Iterable[Mapping[str, Any]]:
    tape = read_tape(folder / TAPE)
    return tape if kinds is None else (event for event in tape if event["event"] in kinds)
