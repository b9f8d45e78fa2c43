"""What a step boundary costs two DDP ranks in a run with a live syncer, as the monitor measures it:
at steps at which nothing came or went (or did one step before).

`python scripts/bench_group_run.py [--steps 2000]`, on the CPUs of this machine.
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
from torch.utils.data import DataLoader, TensorDataset

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import SyncerSettings

WARM_UP, SYNC_EVERY, WIDTH = 100, 50, 256
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Net(pl.LightningModule):
    """A step of well under a millisecond; says what its boundaries took."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times, self.seen = torch.nn.Linear(WIDTH, WIDTH), [], [None, None]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *_: object) -> None:
        strategy = self.trainer.strategy
        self.seen = [*self.seen[-2:], strategy.traffic.figures]
        if self.global_step > WARM_UP and self.seen[0] == self.seen[1] == self.seen[2]:
            self.times.append(1e3 * strategy.boundary_s)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def learn(address: str, steps: int) -> None:
    """The learner; Lightning starts its other rank with this command line."""
    torch.set_num_threads(1)
    strategy = DecoupledDiLoCoStrategy(address, learner="0", inner="ddp")
    module, data = Net(), DataLoader(TensorDataset(torch.randn(4096, WIDTH)), batch_size=16)
    options = {"accelerator": "cpu", "devices": 2, "max_steps": steps, "max_epochs": -1}
    trainer = pl.Trainer(**options, **dict.fromkeys(QUIET, False), strategy=strategy)
    trainer.fit(module, data)
    if trainer.is_global_zero:
        tenths, count = statistics.quantiles(module.times, n=10), len(module.times)
        print(f"ms a boundary, {count} steps: median {tenths[4]:.3f}, p90 {tenths[8]:.3f}")


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
        settings = SyncerSettings("tcp://127.0.0.1:0", Path(folder) / "run", False, config)
        syncer = SyncerRun(settings, close)
        command = [sys.executable, __file__, "--steps", str(arguments.steps), "--address"]
        close.callback(subprocess.Popen([*command, syncer.address]).wait, 60)
        syncer.execute()


if __name__ == "__main__":
    main()
