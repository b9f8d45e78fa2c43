"""A learner of a simulated run: a real `Trainer.fit` in an actor, life after life."""

from __future__ import annotations

import time as real_time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from dd_lightning.launch.learner import CHECKPOINTS, train
from dd_lightning.learner.comm import CommThread
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import TensorInfo
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.comm import VirtualComm
from dd_lightning.simulate.network import VirtualNetwork

LAST = "last.ckpt"
ADDRESS = "tcp://127.0.0.1:1"  # nobody dials it: the channel is virtual


class StepDuration(Callback):
    """Lets virtual time pass for each optimizer step; counts the real seconds of the steps.

    Args:
        durations: seconds of virtual time, one a step.
    """

    def __init__(self, actor: Actor, now: Callable[[], float], durations: Iterator[float]) -> None:
        self._actor, self._now, self._durations = actor, now, durations
        self._began_s: float | None = None
        self.real_seconds = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._began_s = real_time.perf_counter()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if module.automatic_optimization:
            self._pass()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if not module.automatic_optimization:
            self._pass()  # its boundary comes before the next batch
        self._count()

    def _pass(self) -> None:
        self._count()
        self._actor.park(self._now() + next(self._durations))
        self._began_s = real_time.perf_counter()

    def _count(self) -> None:
        if self._began_s is not None:
            self.real_seconds += real_time.perf_counter() - self._began_s
            self._began_s = None


class VirtualCheckpoint(Callback):
    """Lightning's checkpoint every `every_s` of virtual time, as `last.ckpt`."""

    def __init__(self, folder: Path, every_s: float, now: Callable[[], float]) -> None:
        self._file, self._every_s, self._now = folder / LAST, every_s, now
        self._due_s: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._due_s is None:
            self._due_s = self._now() + self._every_s
        elif self._now() >= self._due_s:
            self._due_s += self._every_s
            trainer.save_checkpoint(self._file)


class VirtualLearner:
    """One learner over all its lives.

    Args:
        values: the resolved configuration of the run.
        folder: its own, `learners/<id>`.
        durations: of its steps; a later life goes on with them.
    """

    def __init__(
        self,
        index: int,
        values: Mapping[str, Any],
        folder: Path,
        network: VirtualNetwork,
        durations: Iterator[float],
    ) -> None:
        self.index, self.name = index, str(index)
        self.lives = 0
        self.real_seconds = 0.0
        self.actor: Actor | None = None
        self._values, self._folder = values, folder
        self._network, self._time = network, network.time
        self._durations = durations
        self._comm: VirtualComm | None = None
        self._steps: StepDuration | None = None

    # ------------------------------------------------------------------ lives

    def start(self) -> None:
        """A new process life begins now."""
        self.lives += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        self.actor = Actor(f"learner {self.name}", self._train, self._time)
        self.actor.start()

    def kill(self) -> None:
        """End it where it stands, as SIGKILL does."""
        if self._comm is not None:
            self._comm.drop()
        if self.actor is not None:
            self.actor.kill()

    @property
    def ended(self) -> bool:
        """No life is under way."""
        return self.actor is None or self.actor.ended

    @property
    def error(self) -> BaseException | None:
        """What ended the last life, if that was an error."""
        return None if self.actor is None else self.actor.error

    def _train(self) -> None:
        assert self.actor is not None  # its own
        now = self._time.clock
        self._steps = StepDuration(self.actor, now, self._durations)
        checkpoints = self._folder / CHECKPOINTS
        every_s = self._values["checkpoint"]["every_s"]
        try:
            train(
                self._values,
                self.name,
                self._folder,
                ADDRESS,
                surroundings=self,
                callbacks=[self._steps, VirtualCheckpoint(checkpoints, every_s, now)],
            )
        finally:
            self.real_seconds += self._steps.real_seconds

    # ------------------------------------------------------------------ surroundings

    def now(self) -> float:
        """Virtual seconds."""
        return self._time.now

    def incarnation(self) -> str:
        """The same in every run."""
        return f"{self.name}.{self.lives}"

    def comm(self, link: LearnerLink, tensors: tuple[TensorInfo, ...]) -> CommThread:
        """The comm of this life."""
        assert self.actor is not None  # called in its thread
        self._comm = VirtualComm(link, tensors, self._network, self.actor, self.index)
        return self._comm
