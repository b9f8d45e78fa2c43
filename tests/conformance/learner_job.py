"""A learner that may be a group, as processes of its own: `python -m tests.conformance.learner_job`
and one JSON object. Every rank leaves `FOLDER/ID-RANK.json`: digests of its parameters, peaks of
its boundaries' memory.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, TensorDataset

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.algorithm import canonical_name
from dd_lightning.learner.rng import rng_states
from tests.conformance.live_bytes import LiveBytes
from tests.trainers import QUIET, Regression

ROWS = 4  # of a micro-batch
DIED = 9
WAIT = timedelta(seconds=60)  # of ranks for each other


class Model(Regression):
    """Sharded by FSDP2 where it is asked for."""

    def __init__(self, sharded=False, hydra=False, manual=False, **options):
        super().__init__(**options)
        self.sharded, self.automatic_optimization = sharded, not manual
        if hydra:
            self.save_hyperparameters({"options": OmegaConf.create({"a": {"b": 1}})})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_model(self):
        if not self.sharded:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class OwnDDP(DDPStrategy):
    """A user's own."""

    own_steps = 0

    def optimizer_step(self, *args, **kwargs):
        self.own_steps += 1
        return super().optimizer_step(*args, **kwargs)


class MicroBatches(pl.LightningDataModule):
    """The learner's own stream of micro-batches; rank r of n takes r, r + n, r + 2n, ..."""

    def __init__(self, seed, count):
        super().__init__()
        self.seed, self.count = seed, count

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.count, ROWS, 3, generator=generator)
        y = torch.randn(self.count, ROWS, 1, generator=generator)
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(TensorDataset(x[rank::ranks], y[rank::ranks]), batch_size=None)


def whole(tensor):
    """Of a DTensor too."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(trainer):
    """Of all parameters' bits."""
    found, module = hashlib.sha256(), trainer.lightning_module
    flat = isinstance(trainer.strategy, FSDPStrategy)
    with FSDP.summon_full_params(trainer.model) if flat else contextlib.nullcontext():
        named = {canonical_name(name): one for name, one in module.named_parameters()}
        for _, parameter in sorted(named.items()):
            found.update(whole(parameter).clone().numpy().tobytes())  # NumPy pins what it sees
    return found.hexdigest()


def inner_of(job):
    """The strategy inside, with options that are to survive."""
    if job["inner"] == "ddp":
        return DDPStrategy(timeout=WAIT, **job["options"])
    if job["inner"] == "own_ddp":
        return OwnDDP(timeout=WAIT, **job["options"])
    if job["inner"] == "fsdp":
        return FSDPStrategy(timeout=WAIT, auto_wrap_policy={nn.Linear}, **job["options"])
    if job["inner"] == "fsdp2" and job["file"]:
        ranks = job["devices"]
        return ModelParallelStrategy(ranks, 1, save_distributed_checkpoint=False, timeout=WAIT)
    return job["inner"]


def optimizer_digest(trainer):
    """Of all its state, without the order of its parameters."""
    (optimizer,) = trainer.optimizers
    states = optimizer.state
    if states and isinstance(trainer.strategy, FSDPStrategy):
        configs = FullStateDictConfig(), FullOptimStateDictConfig()
        with FSDP.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT, *configs):
            states = FSDP.optim_state_dict(trainer.model, optimizer)["state"]
    found = [
        json.dumps([key, whole(value).tolist() if torch.is_tensor(value) else value])
        for state in states.values()
        for key, value in sorted(state.items())
    ]
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()


def continuing(trainer):
    """What a checkpoint must bring back beside the weights: of this rank."""
    states = rng_states()
    words = [states["python"], states["numpy"][1].tolist(), states["torch"].tolist()]
    return {
        "rng": hashlib.sha256(json.dumps(words).encode()).hexdigest(),
        "optimizer": optimizer_digest(trainer),
    }


class StartTogether(pl.Callback):
    """No learner makes its first step before all have joined."""

    def __init__(self, job):
        self.folder, self.learner, self.count = Path(job["folder"]), job["learner"], job["learners"]

    def on_train_start(self, trainer, module):
        (self.folder / f"{self.learner}.joined").touch()
        deadline = time.monotonic() + WAIT.total_seconds()
        while len(list(self.folder.glob("*.joined"))) < self.count:
            assert time.monotonic() < deadline, "a learner does not join"
            time.sleep(0.01)


class DieAt(pl.Callback):
    """Every rank ends after this step, without a word, and leaves a checkpoint."""

    def __init__(self, step, path):
        self.step, self.path = step, Path(path)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            said = self.path.with_name(f"{self.path.stem}-{trainer.global_rank}-died.json")
            said.write_text(json.dumps(continuing(trainer)))
            trainer.strategy.barrier("before the end")
            os._exit(DIED)


class Slowly(pl.Callback):
    """Goes on until another learner has left a file."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        time.sleep(0.1)  # a step takes time: there are boundaries at which it can be asked
        trainer.should_stop |= self.path.exists()


class Watch(pl.Callback):
    """Digests at the start and after every optimizer step, what the step applied included."""

    def __init__(self, job, peaks):
        self.job, self.peaks = job, peaks
        self.digests, self.steps, self.boundaries = [], 0, []
        self.continued, self.optimizers = None, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not self.digests:
            self.continued = continuing(trainer) if trainer.optimizers[0].state else None
            self.digests.append(digest(trainer))
            self.steps = trainer.global_step

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.digests.append(digest(trainer))
            self.boundaries.append(trainer.strategy.boundary_s)
            if self.job["until"] or self.job["manual"]:
                self.optimizers.append(optimizer_digest(trainer))
            trainer.should_stop |= len(self.boundaries) == self.job["own_steps"]

    def on_train_end(self, trainer, module):
        said = {
            "digests": self.digests,
            "peaks": self.peaks,
            "boundaries": self.boundaries,
            "strategy": trainer.strategy.inner_name,
            "continued": self.continued,
            "optimizers": self.optimizers,
            "static_graph": getattr(trainer.model, "static_graph", None),
            "own_steps": getattr(trainer.strategy, "own_steps", None),
        }
        path = Path(self.job["folder"]) / f"{self.job['learner']}-{trainer.global_rank}.json"
        path.write_text(json.dumps(said))


def measured(boundary, module, peaks):
    """The boundary, which leaves its peak of live bytes in `peaks`."""

    def run():
        with LiveBytes([tensor.detach() for tensor in module.state_dict().values()]) as live:
            boundary()
        peaks.append(live.peak)

    return run


def main(job):
    strategy = DecoupledDiLoCoStrategy(
        job["address"],
        learner=job["learner"],
        inner=inner_of(job),
        ckpt_weights_only=False if job["hydra"] else None,
        data="none",
        connect_timeout=job["connect_s"],
    )
    peaks, die = [], job["die_at"] > 0
    watch = Watch(job, peaks)
    saved = str(Path(job["folder"]) / f"{job['learner']}.ckpt")
    callbacks = [StartTogether(job), watch]
    callbacks += [DieAt(job["die_at"], saved)] if die else []
    callbacks += [Slowly(Path(job["folder"]) / job["until"])] if job["until"] else []
    options = QUIET | {"devices": job["devices"], "use_distributed_sampler": False}
    options |= {"default_root_dir": job["folder"]}
    trainer = pl.Trainer(
        **options,
        strategy=strategy,
        max_steps=job["steps"],
        accumulate_grad_batches=job["accumulate"],
        callbacks=callbacks,
    )
    kind = {"sharded": job["inner"] == "fsdp2", "hydra": job["hydra"], "manual": job["manual"]}
    module = Model(**kind, seed=job["seed"], width=job["width"], lr=job["lr"])
    data = MicroBatches(int(job["learner"]), job["micro_batches"])
    if job["measured"]:
        strategy._boundary = measured(strategy._boundary, module, peaks)
    resumed = saved if job["resume"] else None
    trainer.fit(module, datamodule=data, ckpt_path=job["checkpoint"] or resumed)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
