"""`dd-lightning export CHECKPOINT --out FILE`: Θ under the task module's own names.

`--format lightning` (default) is what `Module.load_from_checkpoint` reads, hyperparameters
included; `safetensors` is the state dict alone. Tied tensors are written under each of their names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml

from dd_lightning.algorithm.registry import build, import_class
from dd_lightning.commands.parsing import OneLineParser
from dd_lightning.launch.task import build_module
from dd_lightning.launch.theta import load_theta
from dd_lightning.syncer.checkpoint import load_parameters, parameters_sha256, read_checkpoint

FORMATS = ("lightning", "safetensors")
SUFFIXES = {"lightning": ".ckpt", "safetensors": ".safetensors"}


def export(checkpoint: Path, out: Path, module: pl.LightningModule, form: str) -> dict[str, Any]:
    """Write `out`; return what was written, for a message.

    Raises:
        ValueError: not a syncer's checkpoint, another module's, or safetensors is missing.
    """
    load_theta(module, load_parameters(checkpoint))
    out.parent.mkdir(parents=True, exist_ok=True)
    if form == "lightning":
        _write_lightning(module, out)
    else:
        _write_safetensors(module, out)
    return {
        "checkpoint": str(checkpoint),
        "out": str(out),
        "format": form,
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "tensors": len(module.state_dict()),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "parameters_sha256": parameters_sha256(read_checkpoint(checkpoint).parameters),
    }


def find_module(checkpoint: Path, class_path: str | None, run: Path | None) -> pl.LightningModule:
    """The module to export: a class built without arguments, or the task's of a run's config.

    Raises:
        ValueError: neither is there.
    """
    if class_path is not None:
        return build("--module", import_class("--module", class_path), {})
    folder = run or checkpoint.absolute().parent.parent
    config = folder / "config.yaml"
    values = yaml.safe_load(config.read_text()) if config.is_file() else {}
    if "task" not in values:
        raise ValueError(
            f"--run is {str(folder)!r}, which has no config.yaml with a task; allowed: a run "
            "folder of `dd-lightning launch`, or give --module your_package.YourModule instead."
        )
    return build_module(values)


def _write_lightning(module: pl.LightningModule, out: Path) -> None:
    """Through a Trainer, so that the file is exactly what this Lightning version reads."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.strategy.connect(module)
    trainer.save_checkpoint(out, weights_only=True)


def _write_safetensors(module: pl.LightningModule, out: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError(
            "--format is 'safetensors', whose package is missing: pip install 'dd-lightning[kit]'"
        ) from error
    # copies: the format refuses tensors that share memory, as tied ones do
    save_file({name: value.clone() for name, value in module.state_dict().items()}, out)


def main(argv: list[str]) -> int:
    """Export; print what was written.

    Raises:
        ValueError: see `export` and `find_module`.
    """
    parser = OneLineParser(prog="dd-lightning export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="RUN/syncer/step-<epoch>-<merges>.ckpt")
    parser.add_argument("--out", type=Path, help="file to write; default: beside the checkpoint")
    parser.add_argument("--format", choices=FORMATS, default="lightning")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--module", help="dotted path of a LightningModule built without arguments")
    which.add_argument("--run", type=Path, help="run folder; default: the checkpoint's own")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    module = find_module(arguments.checkpoint, arguments.module, arguments.run)
    name = arguments.checkpoint.stem + "-exported" + SUFFIXES[arguments.format]
    out = arguments.out or arguments.checkpoint.with_name(name)
    written = export(arguments.checkpoint, out, module, arguments.format)
    if arguments.json:
        print(json.dumps(written, indent=1))
    else:
        print(f"{written['out']}: {written['tensors']} tensors of {written['module']}")
    return 0
