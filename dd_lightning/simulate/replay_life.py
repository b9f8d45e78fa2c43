"""One process life of a learner, played again: its Trainer in an actor, its messages from the tape.

The session, ledger and strategy are the real ones. Before a step that nothing needs yet it parks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from dd_lightning.learner.inner_state import InnerState, raw_bytes
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import RoundKey, TensorInfo
from dd_lightning.protocol.transfer import StateSource
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.replay_comm import Answers, ReplayComm
from dd_lightning.simulate.replay_script import LifeScript
from dd_lightning.simulate.virtual_time import VirtualTime

TURNS = 3  # that a learner may take without coming nearer to what is asked of it


class StepGate(Callback):
    """Parks before a step that nothing needs yet; keeps what later lives go on from."""

    def __init__(self, life: ReplayLife) -> None:
        self._life = life

    def on_train_batch_start(self, *_: Any) -> None:
        comm = self._life.comm
        while comm is not None and comm.step >= self._life.allowed:
            self._life.actor.park()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._life.comm is not None:
            self._life.comm.step_comes()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        comm, life = self._life.comm, self._life
        if comm is None:
            return
        if comm.step in life.script.saves and comm.step not in life.saved:
            trainer.save_checkpoint(life.checkpoint_file(comm.step))
            life.saved.add(comm.step)
        if comm.step in life.script.donates and comm.step not in life.donated:
            entries = InnerState(module, trainer.optimizers).entries()
            copies = [(entry, raw_bytes(each.cpu().clone())) for entry, each in entries.items()]
            life.donated[comm.step] = StateSource(1, comm.step, copies)


class ReplayLife:
    """One life under replay; the driver lets it go on as far as merges need it.

    Args:
        run: trains the learner (`launch.learner.train`), given this object for its surroundings
            and the callbacks.
        answers: what the syncer would say.
        folder: of its checkpoints.
    """

    def __init__(
        self,
        script: LifeScript,
        run: Callable[[ReplayLife, Sequence[Callback]], None],
        answers: Answers,
        codec: Any,
        folder: Path,
    ) -> None:
        self.script = script
        self.allowed = script.first.step
        self.saved: set[int] = set()
        self.donated: dict[int, StateSource] = {}
        self.comm: ReplayComm | None = None
        self._answers, self._codec, self._folder = answers, codec, folder
        self.actor = Actor(
            f"learner {script.learner}", lambda: run(self, [StepGate(self)]), VirtualTime()
        )

    # ------------------------------------------------------------------ driver

    def go(self, until_step: int) -> None:
        """Let it run until it parks, at most to the end of `until_step`. Raises its error."""
        self.allowed = max(self.allowed, until_step)
        if not self.actor.ended:
            self.actor.go()
        if self.actor.error is not None:
            raise self.actor.error

    def go_until(self, done: Callable[[], bool], until_step: int) -> bool:
        """As `go`, again and again until `done`; False where it comes no nearer to that."""
        turns = 0
        while not done():
            before = None if self.comm is None else self.comm.step
            if self.actor.ended or turns == TURNS:
                return False
            self.go(until_step)
            turns = 0 if self.comm is not None and self.comm.step != before else turns + 1
        return True

    def snapshot(self, key: RoundKey, step: int) -> Snapshot | None:
        """What it contributed to a round, after that step; handed out once. None: it did not."""
        if not self.go_until(lambda: self.comm is not None and key in self.comm.snapshots, step):
            return None
        assert self.comm is not None  # it has contributed
        return self.comm.snapshots.pop(key)

    def kept(self, step: int) -> bool:
        """Whether all that later lives go on from is kept of that step."""
        saves, donates = self.script.saves, self.script.donates
        return not (step in saves - self.saved or step in donates - self.donated.keys())

    def end(self) -> None:
        """The life is over."""
        if not self.actor.ended:
            self.actor.kill()

    def checkpoint_file(self, step: int) -> Path:
        """Where its state after `step` is."""
        return self._folder / f"{self.script.incarnation}-{step}.ckpt"

    # ------------------------------------------------------------------ surroundings

    def now(self) -> float:
        """The session's clock has its own time."""
        return 0.0

    def incarnation(self) -> str:
        """As on the tape."""
        return self.script.incarnation

    def comm_for(self, tensors: tuple[TensorInfo, ...]) -> ReplayComm:
        """The comm of this life."""
        self.comm = ReplayComm(
            self.script, self._answers, tensors, self._codec, lambda: self.actor.park()
        )
        return self.comm


class ReplaySurroundings:
    """Hands a life to the strategy."""

    def __init__(self, life: ReplayLife) -> None:
        self._life = life

    def now(self) -> float:
        """See `ReplayLife`."""
        return self._life.now()

    def incarnation(self) -> str:
        """See `ReplayLife`."""
        return self._life.incarnation()

    def comm(self, link: LearnerLink, tensors: tuple[TensorInfo, ...]) -> Any:
        """The link is not used: what it would say is on the tape."""
        del link
        return self._life.comm_for(tensors)
