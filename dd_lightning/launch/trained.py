"""A trained model and the settings of its run, from a run folder or a file that came of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from dd_lightning.launch.task import build_data, build_module
from dd_lightning.launch.theta import load_theta
from dd_lightning.syncer.checkpoint import load_parameters, newest_checkpoint

CONFIG = "config.yaml"
LIGHTNING = "learners/0/checkpoints"  # of a data-parallel job: Lightning's own
PARENTS = 4  # folders above a file in which its run's configuration is looked for


@dataclass(frozen=True, slots=True)
class Trained:
    """A module with trained values.

    Args:
        file: that they are from.
        values: the run's resolved configuration.
    """

    module: pl.LightningModule
    file: Path
    values: dict[str, Any]

    def validate(self) -> dict[str, float]:
        """What the task's own validation logs, on the run's validation data."""
        judge = pl.Trainer(
            accelerator=self.values["trainer"]["accelerator"],
            precision=self.values["trainer"]["precision"],
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = build_data(self.values)
        return dict(judge.validate(self.module, datamodule=data, verbose=False)[0])


def load_trained(path: Path, run: Path | None = None) -> Trained:
    """The model of a run folder (its newest checkpoint), or of one file: a syncer's checkpoint, a
    Lightning checkpoint, or what `dd-lightning export` wrote.

    Args:
        run: folder of the run; None: that of the file, or one above it.

    Raises:
        ValueError: no such file, no configuration for it, or another module's.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; allowed: a run folder, or a model's file.")
    folder = run or (path if path.is_dir() else _run_of(path))
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}; allowed: a run folder of `dd-lightning launch`."
        )
    values = yaml.safe_load((folder / CONFIG).read_text())
    file = _newest(path) if path.is_dir() else path
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    module = build_module(values)
    _load(module, file)
    return Trained(module.train(False), file, values)


def untrained(values: dict[str, Any], file: Path) -> Trained:
    """The run's model as it began, for comparison."""
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    return Trained(build_module(values).train(False), file, values)


def _run_of(file: Path) -> Path:
    for folder in list(file.absolute().parents)[:PARENTS]:
        if (folder / CONFIG).is_file():
            return folder
    raise ValueError(
        f"no {CONFIG} in the folder of {file} or above it; give --run, the folder of the run that "
        "it is from."
    )


def _newest(run: Path) -> Path:
    lightning = sorted((run / LIGHTNING).glob("step-*.ckpt"))
    newest = newest_checkpoint(run / "syncer") or (lightning[-1] if lightning else None)
    if newest is None:
        raise ValueError(
            f"{run} has no checkpoint in syncer or {LIGHTNING}: has the run written one?"
        )
    return newest


def _load(module: pl.LightningModule, file: Path) -> None:
    """In place; by what the file is."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        _load_state(module, load_file(file), file)
        return
    try:
        theta = load_parameters(file)
    except ValueError as not_of_a_syncer:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
            state = found["state_dict"]
        except Exception:  # of any kind: then it is neither
            raise not_of_a_syncer from None
        _load_state(module, state, file)
    else:
        load_theta(module, theta)


def _load_state(module: pl.LightningModule, state: dict[str, Any], file: Path) -> None:
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"{file} does not fit the run's module {type(module).__name__}: {error}"
        ) from error
