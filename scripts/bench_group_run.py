"""What a step boundary costs two DDP ranks in a run with a live syncer, as the monitor measures it.

`python scripts/bench_group_run.py [--steps 2000]`, on the CPUs of this machine. Steps at which a
fragment came or a contribution was taken, and those right after, are counted apart.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import SyncerSettings

WARM_UP, SYNC_EVERY, WIDTH = 100, 50, 256


class Net(pl.LightningModule):
    """65 000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Collect(pl.Callback):
    """Rank 0's boundaries, in milliseconds."""

    def __init__(self) -> None:
        self.quiet: list[float] = []
        self.due: list[float] = []
        self._before = self._changed = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        figures, boundary_s = trainer.strategy.traffic.figures, trainer.strategy.boundary_s
        due, self._before = figures != self._before, figures
        if trainer.global_step > WARM_UP:
            (self.due if due or self._changed else self.quiet).append(1e3 * boundary_s)
        self._changed = due

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, times in (("nothing is due", self.quiet), ("something is", self.due)):
            if trainer.is_global_zero and len(times) > 1:
                tenths = statistics.quantiles(times, n=10)
                found = f"median {tenths[4]:.3f}, p90 {tenths[8]:.3f}, {len(times)} steps"
                print(f"ms a boundary where {name}: {found}", flush=True)


def learn(address: str, steps: int) -> None:
    """The learner; Lightning starts its other rank with this command line."""
    torch.set_num_threads(1)
    strategy = DecoupledDiLoCoStrategy(address, learner="0", inner="ddp")
    data = DataLoader(TensorDataset(torch.randn(4096, WIDTH)), batch_size=16)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    pl.Trainer(
        **quiet, enable_model_summary=False, accelerator="cpu", devices=2, strategy=strategy,
        max_steps=steps, max_epochs=-1, callbacks=[Collect()],
    ).fit(Net(), data)  # fmt: skip


def main() -> None:
    """Parse the command line; serve, and start the learner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--address", help="of the syncer: be the learner")
    arguments = parser.parse_args()
    if arguments.address:
        return learn(arguments.address, arguments.steps)
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": SYNC_EVERY}
    config = SyncerConfig.load({"algorithm": algorithm, "learners": 1})
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as close:
        run = Path(folder) / "run"
        settings = SyncerSettings("tcp://127.0.0.1:0", run, False, config, None, "")
        syncer = SyncerRun(settings, close)
        command = [sys.executable, __file__, "--address", syncer.address]
        learner = subprocess.Popen([*command, "--steps", str(arguments.steps)])
        close.callback(learner.wait, 60)
        syncer.execute()


if __name__ == "__main__":
    main()
