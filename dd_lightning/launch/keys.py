"""Keys of a run on this machine (`launcher.keys=true`): made in its folder, given to its roles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dd_lightning.transport.keys import (
    ALLOWED_FILE,
    LEARNER,
    OPERATOR,
    SYNCER_FILE,
    key_file,
    new_keys,
)

FOLDER = "keys"  # in the run folder


def ensure_keys(run: Path, learners: Sequence[str]) -> None:
    """Fresh keys, unless the run has its own already and is gone on with."""
    folder = run / FOLDER
    if not (folder / SYNCER_FILE).exists():
        new_keys(folder, learners, OPERATOR)


def syncer_arguments(run: Path) -> list[str]:
    """What `dd-lightning syncer` is given; nothing where the run has no keys."""
    folder = run / FOLDER
    if not (folder / SYNCER_FILE).exists():
        return []
    return ["--key", str(folder / SYNCER_FILE), "--allow", str(folder / ALLOWED_FILE)]


def learner_environment(run: Path, learner: str) -> dict[str, str]:
    """DD_KEY of a learner; nothing where the run has no keys."""
    path = key_file(run / FOLDER, LEARNER, learner)
    return {"DD_KEY": str(path)} if path.exists() else {}
