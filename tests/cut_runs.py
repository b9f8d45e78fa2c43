"""Runs over real sockets with learners as threads, which can be cut, thrown away and restored."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.cuts import read_manifest
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import SyncerSettings
from tests.trainers import QUIET, WAIT_S, Regression


class Batches:
    """An endless, resumable stream of batches; batch k is the same whenever it is drawn."""

    def __init__(self, seed: int, rows: int = 4) -> None:
        self.seed, self.rows, self.position = seed, rows, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(1000 * self.seed + self.position)
            self.position += 1
            x = torch.randn(self.rows, 3, generator=generator)
            yield x, torch.randn(self.rows, 1, generator=generator)

    def __len__(self) -> int:
        return 1 << 30  # Lightning fetches one ahead of a stream without a length

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Model(Regression):
    """With a choice of optimizer, and a schedule."""

    def __init__(self, seed: int, optimizer: str = "sgd") -> None:
        super().__init__(seed)
        self.optimizer = optimizer

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class AtStep(pl.Callback):
    """Calls `what()` once, at the end of the batch after which so many steps are done."""

    def __init__(self, step: int, what) -> None:
        self.step, self.what = step, what

    def on_train_batch_end(self, trainer, module, *_: object) -> None:
        if trainer.global_step == self.step:
            self.what()


class Run:
    """One start of the syncer in the main thread, with its learners as threads.

    Args:
        cut: restore the whole run from this one.
        callbacks: made for each learner by `callbacks(run, index)`.
    """

    def __init__(
        self, folder: Path, config, steps: int, modules, *, cut=None, callbacks=None, learners=None
    ) -> None:
        self.folder, self.config, self.steps, self.modules = folder, config, steps, modules
        self.cut = cut
        self.errors: list[BaseException] = []
        self.trainers: list[pl.Trainer] = []
        self.learners = range(len(modules)) if learners is None else learners
        self._callbacks = callbacks or (lambda run, index: [])
        self.manifest = read_manifest(folder / "syncer", cut) if cut else None
        self.syncer: SyncerRun | None = None

    def execute(self) -> str:
        """To its end; its status. The first error of a learner is raised."""
        settings = SyncerSettings(
            "tcp://127.0.0.1:0", self.folder, self.cut is not None, self.config, cut=self.cut
        )  # fmt: skip
        with contextlib.ExitStack() as close:
            self.syncer = SyncerRun(settings, close)
            threads = [
                threading.Thread(target=self._guarded, args=(i,), daemon=True)
                for i in self.learners
            ]
            for thread in threads:
                thread.start()
            outcome = self.syncer.execute()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a learner does not end"
        if self.errors:
            raise self.errors[0]
        return outcome.status

    def tape(self) -> list[dict]:
        return list(read_tape(self.folder / "tape.jsonl"))

    def stop(self) -> None:
        """Throw it away."""
        self.syncer.server.request_stop("thrown away")

    def _guarded(self, index: int) -> None:
        try:
            self._train(index)
        except BaseException as error:
            self.errors.append(error)
            os.kill(os.getpid(), 2)  # the syncer is not to wait for it

    def _train(self, index: int) -> None:
        name = str(index)
        strategy = DecoupledDiLoCoStrategy(self.syncer.address, learner=name, data="none")
        trainer = pl.Trainer(
            **QUIET, strategy=strategy, max_steps=self.steps,
            default_root_dir=str(self.folder / "learners" / name),
            callbacks=self._callbacks(self, index),
        )  # fmt: skip
        self.trainers.append(trainer)
        file = self.manifest["learners"][name]["file"] if self.manifest else None
        trainer.fit(self.modules[index], Batches(index), ckpt_path=file)
