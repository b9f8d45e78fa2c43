"""Trainer options of the features, and what their users look at after fit."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision


def always(**options):
    """The same options for every learner."""
    return lambda learner, folder: dict(options)


def with_scaler(learner, folder):
    """`precision="16-mixed"` is bf16 on a CPU; a scaler shows what a GPU's does."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def scale_left(trainer, module, folder):
    """Halved once for each step that was skipped."""
    return {"scale": trainer.precision_plugin.scaler.get_scale()}


def learning_rate(trainer, module, folder):
    """Of the first optimizer."""
    return {"lr": trainer.optimizers[0].param_groups[0]["lr"]}


def stops_early(learner, folder):
    """At the second validation, whatever the loss."""
    stop = EarlyStopping("steps_done", mode="max", stopping_threshold=7.5)
    return {"callbacks": [stop], "val_check_interval": 4, "limit_val_batches": 1}


def checkpoints(learner, folder):
    """The newest of every 4 steps, and the last."""
    saver = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, save_last=True)
    return {"callbacks": [saver], "enable_checkpointing": True}


def saved(trainer, module, folder):
    """Files, and the weights in the one of step 8: those after that step's merge."""
    files = sorted(path.name for path in folder.glob("*.ckpt"))
    state = checkpoint(folder / "epoch=0-step=8.ckpt")
    return {"files": files, **state["state_dict"]}


def checkpoint(path):
    """A file, or what Lightning leaves in its place where parameters are in shards."""
    if path.is_dir():
        return _load_distributed_checkpoint(path)
    return torch.load(path, weights_only=False)


def exponential(average, now, steps):
    """A function that can be pickled, for ranks that are spawned."""
    return 0.5 * (average + now)


def averaging(learner, folder):
    """An exponential average of the weights, which the module holds after fit."""
    return {"callbacks": [WeightAveraging(avg_fn=exponential)]}


def monitors_rate(learner, folder):
    """Into a CSV file."""
    return {
        "callbacks": [LearningRateMonitor("step")],
        "logger": CSVLogger(folder, name="", version=""),
        "log_every_n_steps": 1,
    }


def rates_logged(trainer, module, folder):
    """Every line of the file that holds a rate."""
    lines = (folder / "metrics.csv").read_text().splitlines()
    return {"lines": sorted(lines), "count": len(lines)}


def progress_bar(learner, folder):
    """One console has one live display: learner 0's."""
    return {"callbacks": [RichProgressBar()], "enable_progress_bar": True} if not learner else {}


def bar_at(trainer, module, folder):
    """How far learner 0's bar came."""
    bar = trainer.progress_bar_callback
    return {"done": None if bar is None else bar.progress.tasks[0].completed}


def global_step(trainer, module, folder):
    """Lightning's own count."""
    return {"global_step": trainer.global_step, "epoch": trainer.current_epoch}


def val_loss(trainer, module, folder):
    """As callbacks and users read it."""
    return {"val_loss": trainer.callback_metrics["val_loss"]}
