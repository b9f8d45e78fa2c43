"""Sweeps whose runs are made up in no time, through Hydra and the launcher as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dd_lightning.report.summary import summarize, write_summary
from tests.tapes import Tape


class MadeUpRuns:
    """In place of `launch.app._play`: notes what is played, and writes what a run leaves.

    Validation loss: 2 + lr / 10 + seed / 1000, so that every configuration has its own.
    """

    def __init__(self) -> None:
        self.played: list[tuple[str, int, float]] = []  # folder's name, seed, outer lr
        self.fails_at: set[int] = set()  # seeds

    def play(self, folder: Path, values: Mapping[str, Any]) -> float:
        seed, lr = values["seed"], values["algorithm"]["outer"]["lr"]
        self.played.append((folder.name, seed, lr))
        assert not (folder / "learners").exists(), "an earlier start's files are still there"
        (folder / "learners" / "0").mkdir(parents=True)
        loss = 2.0 + lr / 10 + seed / 1000
        tape = Tape()
        tape.start(values["learners"], [30, 10], task=values["task"])
        tape.events[0]["seed"] = seed
        tape.add(
            "evaluation",
            20.0,
            file="20.ckpt",
            loss=loss,
            metrics={},
            final=True,
            checkpoint_t_s=20.0,
            tokens_merged=1000.0,
        )
        status = "failed" if seed in self.fails_at else "finished"
        tape.add("run_end", 30.0, status=status, parameters_sha256=None, seconds=25.0)
        lines = "".join(json.dumps(event) + "\n" for event in tape.events)
        (folder / "tape.jsonl").write_text(lines)
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(values)))
        (folder / "report.html").write_text("drawn elsewhere")
        write_summary(folder, summarize(tape.events))
        if status == "failed":
            raise ValueError(f"seed {seed} fails")
        return loss


def summaries(sweep: Path) -> dict[str, dict[str, Any]]:
    """By the name of the folder."""
    found = sorted(sweep.glob("*/summary.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def finished(sweep: Path) -> list[str]:
    """Names of the folders whose run has."""
    found = summaries(sweep)
    return [name for name, summary in found.items() if summary["status"] == "finished"]


def stamps(sweep: Path) -> dict[str, tuple[int, bytes]]:
    """Of each finished job what tells whether it was played again: its tape's time and bytes."""
    tapes = {name: sweep / name / "tape.jsonl" for name in finished(sweep)}
    return {name: (path.stat().st_mtime_ns, path.read_bytes()) for name, path in tapes.items()}
