"""What a what-if is asked, and its outcome beside the original's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from dd_lightning.launch.evaluator import Evaluator
from dd_lightning.launch.settings import Settings, check
from dd_lightning.simulate.replay import Outcome
from dd_lightning.simulate.replay_script import Script
from dd_lightning.simulate.what_if import WhatIf
from dd_lightning.simulate.what_if_settings import QUORUM, changed


def what_if_settings(settings: Settings, sets: list[tuple[str, Any]]) -> Settings:
    """The run's settings with these; warns where they are what they were.

    Raises:
        ValueError: a value is not allowed.
    """
    other = check(changed(settings.values, sets))
    quorum = other.values["algorithm"]["quorum"]
    learners = other.syncer.num_data_slots
    if quorum != "all" and quorum > learners:
        raise ValueError(
            f"{QUORUM} is {quorum}; allowed: 1 to {learners}, as many learners as the run may have."
        )
    if other.values["algorithm"] == settings.values["algorithm"]:
        asked = ", ".join(f"{key}={value}" for key, value in sets)
        warnings.warn(f"{asked} has no effect: the run had it too.", stacklevel=2)
    return other


def what_if(
    script: Script,
    settings: Settings,
    other: Settings,
    original: Outcome,
    folder: Path,
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """Play it, validate both Θ, and compare.

    Args:
        original: of the replay that was equal.
        folder: for checkpoints of learners.
    """
    quorum = other.syncer.quorum if other.syncer.quorum != settings.syncer.quorum else None
    played = WhatIf(script, other, folder / "what_if", quorum)
    outcome = played.play()
    rounds = played.compared.rounds
    changed_rounds = [
        row for row in rounds if row["contributors"]["original"] != row["contributors"]["what_if"]
    ]
    evaluator = Evaluator(settings.values, folder)
    losses = {
        side: evaluator.evaluate_theta(theta, side, initial=False, final=True)["loss"]
        for side, theta in (("original", original.theta), ("what_if", outcome.theta))
    }
    return {
        "set": dict(asked),
        "means": {
            "validation loss": losses,
            "agreement": _means(rounds, "agreement"),
            "outer norm": _means(rounds, "outer_norm"),
            "contributors": {
                side: fmean(len(row["contributors"][side]) for row in rounds) for side in losses
            },
        },
        "rounds_changed": len(changed_rounds),
        "left_out": played.compared.left_out,
        "rounds": rounds,
    }


def _means(rounds: list[dict[str, Any]], name: str) -> dict[str, float | None]:
    """Over the rounds in which both are known."""
    pairs = [row[name] for row in rounds if None not in row[name].values()]
    return {
        side: fmean(pair[side] for pair in pairs) if pairs else None
        for side in ("original", "what_if")
    }
