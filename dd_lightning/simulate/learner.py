"""One process life of a learner in a simulated run: a real `Trainer.fit` in an actor."""

from __future__ import annotations

import time as real_time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dd_lightning.chaos.callback import FaultCallback
from dd_lightning.chaos.plan import FaultPlan
from dd_lightning.launch.learner import CHECKPOINTS, train
from dd_lightning.launch.supervision import FINISHED_CODE, KILLED_CODE, LEFT_CODE
from dd_lightning.learner.comm import CommThread
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import TensorInfo
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.comm import VirtualComm
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.processes import Pausable
from dd_lightning.simulate.step_record import StepRecord

LAST = "last.ckpt"
ADDRESS = "tcp://127.0.0.1:1"  # nobody dials it: the channel is virtual


class StepDuration(Callback):
    """Lets virtual time pass for each optimizer step; counts what the steps really cost.

    Args:
        durations: seconds of virtual time, one a step.
        record: where each step's begin and end go.
    """

    def __init__(
        self, actor: Actor, durations: Iterator[float], record: StepRecord | None = None
    ) -> None:
        self._actor, self._durations, self._record = actor, durations, record
        self._began: tuple[float, float] | None = None
        self.real_seconds = self.cpu_seconds = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if module.automatic_optimization:
            self._pass()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if not module.automatic_optimization:
            self._pass()  # its boundary comes before the next batch
        self._count()

    def _pass(self) -> None:
        self._count()
        if self._record is not None:
            self._record.begin()
        self._actor.work(next(self._durations))
        if self._record is not None:
            self._record.end()
        self._begin()

    def _begin(self) -> None:
        self._began = (real_time.perf_counter(), real_time.thread_time())

    def _count(self) -> None:
        if self._began is not None:
            self.real_seconds += real_time.perf_counter() - self._began[0]
            self.cpu_seconds += real_time.thread_time() - self._began[1]
            self._began = None


class VirtualCheckpoint(Checkpoint):
    """Lightning's checkpoint every `every_s` of virtual time and on leaving, as `last.ckpt`."""

    def __init__(self, folder: Path, every_s: float, now: Callable[[], float]) -> None:
        self._file, self._every_s, self._now = folder / LAST, every_s, now
        self._due_s: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._due_s is None:
            self._due_s = self._now() + self._every_s
        elif self._now() >= self._due_s:
            self._due_s += self._every_s
            trainer.save_checkpoint(self._file)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self._file)


class _Told(Callback):
    """Hands SIGTERM to the Trainer: a signal itself would reach every learner of the process."""

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self.to_leave = False

    def leave(self) -> None:
        """As Lightning's own handler does."""
        self.to_leave = True
        if self._trainer is not None:
            self._trainer._signal_connector.received_sigterm = True

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._trainer = trainer

    def on_train_batch_start(self, *_: Any) -> None:
        if self.to_leave:  # it was told before Lightning began to listen
            self.leave()


class VirtualLearner(Pausable):
    """One life; a later one is a new object, as a later process is.

    Args:
        index: of the learner, for its region.
        life: 1 for its first.
        values: the resolved configuration of the run.
        folder: its own, `learners/<id>`.
        durations: of its steps; the learner's later lives go on with them.
        plan: faults, some of which a learner carries out itself.
    """

    def __init__(
        self,
        index: int,
        life: int,
        values: Mapping[str, Any],
        folder: Path,
        network: VirtualNetwork,
        durations: Iterator[float],
        plan: FaultPlan,
    ) -> None:
        super().__init__(f"learner {index}", life)
        self._index, self._life = index, life
        self._values, self._folder, self._plan = values, folder, plan
        self._network, self._time = network, network.time
        self._actor = Actor(self.name, self._play, network.time)
        record = StepRecord(folder, network.time.clock) if values["launcher"]["step_log"] else None
        self._steps = StepDuration(self._actor, durations, record)
        self._told = _Told()
        self._comm: VirtualComm | None = None
        self._code = FINISHED_CODE  # once it has ended

    # ------------------------------------------------------------------ as a process

    def start(self) -> None:
        """It begins now."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._actor.start()

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._actor.ended

    @property
    def error(self) -> BaseException | None:
        """What ended it, if that was an error."""
        return self._actor.error

    def exit_code(self) -> int | None:
        """As a process has it."""
        if not self.ended:
            return None
        return self._code if self.error is None else 1

    @property
    def step_cost(self) -> tuple[float, float]:
        """Real seconds and processor seconds of its steps."""
        return self._steps.real_seconds, self._steps.cpu_seconds

    def kill(self) -> None:
        """End it where it stands, as SIGKILL does, also by its own hand."""
        if self.ended:
            return
        self._code = KILLED_CODE
        if self._comm is not None:
            self._comm.drop()
        if self._actor.is_current:
            self._actor.die()
        self._actor.kill()

    def terminate(self) -> None:
        """Tell it to leave in order: at its next step it writes its state and says goodbye."""
        self._told.leave()

    def pause(self, seconds: float) -> None:
        """Stop it where it stands, comm and all, for so long; also by its own hand."""
        self._actor.freeze()
        if self._comm is not None:
            self._comm.freeze()
        self._time.at(self._time.now + seconds, self.resume)
        if self._actor.is_current:
            self._actor.park(self._time.now)

    def resume(self) -> None:
        """It goes on, first with what has come meanwhile."""
        if self.ended:
            return
        if self._comm is not None:
            self._comm.thaw()
        self._actor.thaw()

    def _play(self) -> None:
        now = self._time.clock
        callbacks: list[Callback] = [self._told, self._steps]
        if self._plan.kinds:
            callbacks.append(
                FaultCallback(
                    self._plan,
                    str(self._index),
                    self._folder.parent.parent,
                    clock=now,
                    sleep=self._actor.work,
                    kill=lambda *_: self.kill(),
                    stop=lambda _, seconds: self.pause(seconds),
                    wall=now,
                )
            )
        every_s = self._values["checkpoint"]["every_s"]
        callbacks.append(VirtualCheckpoint(self._folder / CHECKPOINTS, every_s, now))
        try:
            train(
                self._values | {"launcher": self._values["launcher"] | {"step_log": False}},
                str(self._index),
                self._folder,
                ADDRESS,
                surroundings=self,
                callbacks=callbacks,
            )
        except (SIGTERMException, InterruptedError):  # the second: while joining
            self._code = LEFT_CODE

    # ------------------------------------------------------------------ surroundings

    def now(self) -> float:
        """Virtual seconds."""
        return self._time.now

    def incarnation(self) -> str:
        """The same in every run."""
        return f"{self._index}.{self._life}"

    def comm(self, link: LearnerLink, tensors: tuple[TensorInfo, ...]) -> CommThread:
        """The comm of this life."""
        self._comm = VirtualComm(link, tensors, self._network, self._actor, self._index)
        return self._comm
