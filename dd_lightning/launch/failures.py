"""What failures cost: a disturbed run beside an undisturbed one at equal merged tokens.

Both runs are `experiment=bench_failures`, in processes of their own; the figures come from their
summaries, tapes and step logs, and from nothing else.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dd_lightning.launch.step_log import Step, read_steps
from dd_lightning.protocol.tape import read_tape
from dd_lightning.report.lives import Lives, times
from dd_lightning.report.read import SUMMARY, TAPE

WARM_UP_STEPS = 20  # of each incarnation: allocations, caches, its first applies
UPTIME, GOODPUT_SHARE, LOSS_WITHIN = 1.0, 0.95, 0.05
STEP_RATIO, BOUNDARY_MS, BOUNDARY_RATIO = 1.2, 2.0, 1.5


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run; step figures are over all incarnations of all learners, without `WARM_UP_STEPS`."""

    seconds: float
    uptime: float
    goodput: float
    alive_share: float  # Σ seconds_alive / Σ allocated
    validation_loss: float
    tokens_merged: float
    kills: dict[str, int]  # by role
    joins: dict[str, int]  # by learner: first ones, rejoins and re-attaches
    steps: int
    step_ms_p50: float
    step_ms_p99: float
    boundary_ms_p50: float
    boundary_ms_p99: float


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: what was found, what is allowed."""

    what: str
    found: float
    allowed: str
    kept: bool


def launch(folder: Path, overrides: Sequence[str]) -> None:
    """One run of `experiment=bench_failures` in a new folder.

    Raises:
        RuntimeError: it failed, which it also does where a killed process is not at work again.
    """
    command = [sys.executable, "-m", "dd_lightning.cli", "launch", "experiment=bench_failures"]
    command += [f"hydra.run.dir={folder}", *overrides]
    done = subprocess.run(command, stdout=sys.stderr, check=False)  # stdout is the bench's own
    if done.returncode != 0:
        raise RuntimeError(f"the run in {folder} ended with exit code {done.returncode}")


def figures(folder: Path) -> RunFigures:
    """Of a finished run with `launcher.step_log`."""
    summary = json.loads((folder / SUMMARY).read_text())
    lives, kills = Lives(), Counter[str]()
    for event in read_tape(folder / TAPE):
        lives.feed(event)
        if event["event"] == "fault" and event["fired"]:
            kills[event["target"]] += 1
    clock = times(lives, summary["learners"])
    planned = [name for name, life in lives.learners.items() if life.planned]
    learners = summary["per_learner"]
    steps = _warm_steps(folder, list(learners))
    return RunFigures(
        seconds=summary["seconds"],
        uptime=summary["uptime"],
        goodput=summary["goodput"],
        alive_share=sum(clock.alive[name] for name in planned) / clock.allocated,
        validation_loss=summary["loss"]["validation"],
        tokens_merged=sum(one["tokens_merged"] for one in learners.values()),
        kills=dict(kills),
        joins={name: one["joins"] for name, one in learners.items()},
        steps=len(steps),
        step_ms_p50=_percentile([step.seconds for step in steps], 50),
        step_ms_p99=_percentile([step.seconds for step in steps], 99),
        boundary_ms_p50=_percentile([step.boundary_s for step in steps], 50),
        boundary_ms_p99=_percentile([step.boundary_s for step in steps], 99),
    )


def _warm_steps(folder: Path, learners: Sequence[str]) -> list[Step]:
    lives = [read_steps(folder / "learners" / learner) for learner in learners]
    return [step for life in itertools.chain(*lives) for step in life[WARM_UP_STEPS:]]


def _percentile(seconds: Sequence[float], percent: int) -> float:
    """In milliseconds."""
    return 1000.0 * statistics.quantiles(seconds, n=100)[percent - 1]


def checks(disturbed: RunFigures, undisturbed: RunFigures) -> list[Check]:
    """What the product promises of a run with failures."""
    least_goodput = GOODPUT_SHARE * disturbed.alive_share
    loss = disturbed.validation_loss / undisturbed.validation_loss
    step = disturbed.step_ms_p99 / undisturbed.step_ms_p99
    boundary_ms = max(BOUNDARY_MS, BOUNDARY_RATIO * undisturbed.boundary_ms_p99)
    return [
        Check("uptime", disturbed.uptime, f">= {UPTIME:.0%}", disturbed.uptime >= UPTIME - 1e-9),
        Check(
            "goodput",
            disturbed.goodput,
            f">= {least_goodput:.4f} = {GOODPUT_SHARE} x seconds alive / allocated",
            disturbed.goodput >= least_goodput,
        ),
        Check("loss / undisturbed", loss, f"<= {1 + LOSS_WITHIN}", loss <= 1 + LOSS_WITHIN),
        Check("p99 step / undisturbed", step, f"<= {STEP_RATIO}", step <= STEP_RATIO),
        Check(
            "p99 boundary, ms",
            disturbed.boundary_ms_p99,
            f"<= {boundary_ms:.2f}",
            disturbed.boundary_ms_p99 <= boundary_ms,
        ),
    ]


def result(disturbed: RunFigures, undisturbed: RunFigures) -> dict[str, Any]:
    """Plain values of all of it."""
    found = checks(disturbed, undisturbed)
    return {
        "disturbed": asdict(disturbed),
        "undisturbed": asdict(undisturbed),
        "checks": [asdict(check) for check in found],
        "kept": all(check.kept for check in found),
    }
