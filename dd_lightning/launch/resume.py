"""`launcher.resume`: going on with the run of an existing folder, from its own `config.yaml`.

`last`: the syncer's newest checkpoint and each learner's own newest one. A cut's id: the whole run
as it was at that cut; checkpoints that the learners wrote since are put aside, not deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from dd_lightning.launch.roles import CONFIG, CUTS
from dd_lightning.launch.settings import LAST
from dd_lightning.report.read import SUMMARY, TAPE

SETTING = "launcher.resume"
NO_EFFECT_BUT = (SETTING, "hydra.")  # overrides that a resumed run takes
CHECKPOINTS = "checkpoints"


def read_run(folder: Path, resume: str) -> dict[str, Any]:
    """The resolved configuration of the run in `folder`, to go on with.

    Raises:
        ValueError: no run there, one that has finished, or one without that cut.
    """
    where = f"{SETTING} is {resume!r} and hydra.run.dir {str(folder)!r}"
    if not (folder / CONFIG).is_file() or not (folder / TAPE).is_file():
        raise ValueError(
            f"{where}, which holds no run; allowed: the folder of a run (the one with {TAPE} in "
            f"it). Leave {SETTING} out to start a new one."
        )
    if _status(folder) == "finished":
        raise ValueError(
            f"{where}, whose run has finished: there is nothing to go on with. Start a new run, "
            "or export this one's model with `dd-lightning export`."
        )
    if resume != LAST and not (folder / "syncer" / CUTS / f"{resume}.json").is_file():
        found = sorted(path.stem for path in (folder / "syncer" / CUTS).glob("*.json"))
        raise ValueError(
            f"{where}, which has no such cut; allowed: {' | '.join([LAST, *found])}. Cuts are made "
            "with `dd-lightning checkpoint`."
        )
    values: dict[str, Any] = yaml.safe_load((folder / CONFIG).read_text())
    values["launcher"] = {**values["launcher"], "resume": resume}
    return values


def without_effect(overrides: Iterable[str]) -> list[str]:
    """A sentence for each override of the command line that a resumed run does not take."""
    return [
        f"{override} has no effect: with {SETTING} everything is the run's own config.yaml"
        for override in overrides
        if not override.lstrip("+~").startswith(NO_EFFECT_BUT)
    ]


def put_aside(folder: Path, cut: str) -> list[Path]:
    """Rename what learners wrote after a cut, so that a restart does not take it for the newest.

    Returns:
        The new names.
    """
    moved = []
    for checkpoints in sorted((folder / "learners").glob(f"*/{CHECKPOINTS}")):
        number = sum(1 for _ in checkpoints.parent.glob(f"{CHECKPOINTS}.before-{cut}*"))
        suffix = f".{number}" if number else ""
        aside = checkpoints.with_name(f"{CHECKPOINTS}.before-{cut}{suffix}")
        moved.append(checkpoints.rename(aside))
    return moved


def _status(folder: Path) -> str | None:
    path = folder / SUMMARY
    return json.loads(path.read_text()).get("status") if path.is_file() else None
