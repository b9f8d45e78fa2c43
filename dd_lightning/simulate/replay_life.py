"""One process life of a learner, played again: its Trainer in an actor, its messages from the tape.

The session, ledger and strategy are the real ones. What the syncer said comes from the script and
from Θ as the replay has computed it; where the tape lets the learner apply a version that is not
merged yet, or take a step that nothing needs yet, it parks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from dd_lightning.algorithm import CODECS, resolve
from dd_lightning.learner.comm import Delivery
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import (
    FinishNow,
    Fragment,
    Pull,
    Released,
    RoundKey,
    TensorInfo,
    Welcome,
)
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.replay_script import ApplyAt, Attach, Given, LifeScript
from dd_lightning.simulate.virtual_time import VirtualTime

Theta = Callable[[LifeScript, ApplyAt], tuple[Fragment, Mapping[str, Any]] | None]
"""The fragment of an apply with its message, None while it is not merged."""


class ReplayComm:
    """What the comm thread is to a session. Nothing waits here but for what the replay computes."""

    def __init__(self, life: ReplayLife, tensors: tuple[TensorInfo, ...]) -> None:
        self._life, self._tensors = life, tensors
        self._now = 0.0
        self.snapshots: dict[RoundKey, Snapshot] = {}
        self.initial: dict[int, Mapping[str, Any]] = {}
        self.step = life.script.first.step  # inner steps done, as far as the session has said
        self._coming = life.script.first.step  # whose boundary comes next
        script = life.script
        self._attaches = list(script.attaches)
        self._applies = list(script.applies)
        self._pulls = list(script.given)
        self._told_to_finish = False
        self._finishing = self._released = False

    # ------------------------------------------------------------------ what a session calls

    def clock(self) -> float:
        """Moves only where the session waits in vain."""
        return self._now

    @property
    def wants_deltas(self) -> bool:
        """Whether the run's codec encodes deltas."""
        return self._life.codec.encodes == "delta"

    def start(self) -> None:
        """Nothing to connect."""

    def check(self) -> None:
        """Nothing goes wrong in here."""

    def stop(self, timeout_s: float) -> bool:
        """Nothing to end."""
        del timeout_s
        return True

    def call(self, command: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """What the session tells the link: snapshots and values are kept, the rest is known."""
        del options
        name = command.__name__
        if name == "contribute":
            self.snapshots[arguments[0].round] = arguments[0]
        elif name == "initial":
            self.initial[arguments[0]] = arguments[1]
        elif name == "report":
            self.step = arguments[0].step
        elif name == "finish":
            self._finishing = True

    def next(self, timeout_s: float) -> Delivery | None:
        """The next message of the script for this boundary."""
        while True:
            message = self._due()
            if message is not None:
                return message
            if timeout_s <= 0:
                return None
            if not self._worth_waiting():
                self._now += timeout_s
                return None
            self._life.actor.park()

    # ------------------------------------------------------------------ the script

    def step_comes(self) -> None:
        """The boundary of the next step comes next."""
        self._coming = self.step + 1

    def _due(self) -> Delivery | None:
        if self._attaches and self._attaches[0].step <= self._coming:
            return self._deliver(self._life.welcome(self._attaches.pop(0), self._tensors))
        for index, apply in enumerate(self._applies):
            if apply.step > self._coming:
                break
            found = self._life.theta(apply)
            if found is not None:
                del self._applies[index]
                return self._deliver(*found)
        for index, given in enumerate(self._pulls):
            if given.step > self._coming:
                break
            if not given.final or self._finishing:
                del self._pulls[index]
                return self._deliver(self._life.pull(given))
        finish_at = self._life.script.told_to_finish_at
        if finish_at is not None and finish_at <= self._coming and not self._told_to_finish:
            self._told_to_finish = True
            return self._deliver(FinishNow(generation=0, reason="as on the tape"))
        if self._finishing and self._over and not self._released:
            self._released = True
            return self._deliver(Released(generation=0))
        return None

    @property
    def _over(self) -> bool:
        return not self._pulls

    def _worth_waiting(self) -> bool:
        """An apply of this boundary is not merged yet, or the end has not been asked for."""
        return any(apply.step <= self._coming for apply in self._applies) or self._finishing

    def _deliver(self, message: Any, tensors: Mapping[str, Any] | None = None) -> Delivery:
        return Delivery(message, tensors, self._now)


class StepGate(Callback):
    """Parks before a step that nothing needs yet; saves where the tape says it saved."""

    def __init__(self, life: ReplayLife) -> None:
        self._life = life

    def on_train_batch_start(self, *_: Any) -> None:
        comm = self._life.comm
        while comm is not None and comm.step >= self._life.allowed:
            self._life.actor.park()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._life.comm is not None:
            self._life.comm.step_comes()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        comm, life = self._life.comm, self._life
        if comm is not None and comm.step in life.saves and comm.step not in life.saved:
            trainer.save_checkpoint(life.checkpoint_file(comm.step))
            life.saved.add(comm.step)


class ReplayLife:
    """One life under replay; the driver lets it go on as far as merges need it.

    Args:
        run: trains the learner (`launch.learner.train`), given this object for its surroundings
            and the callbacks.
        theta, welcome, pull: what the syncer would say, from the driver.
        folder: of its checkpoints.
    """

    def __init__(
        self,
        script: LifeScript,
        run: Callable[[ReplayLife, Sequence[Callback]], None],
        theta: Theta,
        welcome: Callable[[LifeScript, Attach, tuple[TensorInfo, ...]], Welcome],
        pull: Callable[[LifeScript, Given], Pull],
        codec: object,
        folder: Any,
    ) -> None:
        self.script = script
        self.codec: Any = resolve("codec", codec, CODECS)
        self.allowed = script.first.step
        self.saves = set(script.checkpoints)
        self.saved: set[int] = set()
        self.comm: ReplayComm | None = None
        self._theta, self._welcome, self._pull = theta, welcome, pull
        self._folder = folder
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

    def end(self) -> None:
        """The life is over."""
        if not self.actor.ended:
            self.actor.kill()

    def checkpoint_file(self, step: int) -> Any:
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
        self.comm = ReplayComm(self, tensors)
        return self.comm

    # ------------------------------------------------------------------ what the syncer says

    def theta(self, apply: ApplyAt) -> tuple[Fragment, Mapping[str, Any]] | None:
        """Θ's fragment of an apply."""
        return self._theta(self.script, apply)

    def welcome(self, attach: Attach, tensors: tuple[TensorInfo, ...]) -> Welcome:
        """The answer to a join."""
        return self._welcome(self.script, attach, tensors)

    def pull(self, given: Given) -> Pull:
        """The question that a contribution answered."""
        return self._pull(self.script, given)


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
