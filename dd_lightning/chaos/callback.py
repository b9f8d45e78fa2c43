"""The Lightning callback that carries out faults in a learner's process, at its step or on order.

Killed or paused it is by its own hand, so that it happens at that very step. What only the launcher
can do at a learner's step (the network, the syncer) is written down here for it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from dd_lightning.chaos.faults import KINDS, SYNCER
from dd_lightning.chaos.plan import FaultPlan
from dd_lightning.chaos.records import DONE, ORDERS, NewRows, append
from dd_lightning.chaos.signals import pause

log = logging.getLogger(__name__)

HUGE = 10.0  # factor of all parameters: what the next steps compute stays finite (a hundred: NaN)
STEPS_MEASURED = 50


class FaultCallback(Callback):
    """Fires what the plan has for this learner, once over all lives of its process.

    A learner killed loses its steps since its last contribution; one poisoned loses those until it
    has loaded Θ again; the other faults cost time only.

    Args:
        plan: the whole run's.
        folder: the run folder.
        clock, sleep, kill, stop, wall: of tests, and of virtual time; `stop` as `signals.pause`.
    """

    def __init__(
        self,
        plan: FaultPlan,
        learner: str,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        kill: Callable[[int, int], None] = os.kill,
        stop: Callable[[int, float], subprocess.Popen[bytes] | None] = pause,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._guard, self._run, self._folder = plan.guard, plan.run, folder
        self._clock, self._sleep, self._wall = clock, sleep, wall
        self._kill, self._stop = kill, stop
        own = folder / "learners" / learner
        self._done_file = own / DONE
        self._done = {row["number"] for row in NewRows(self._done_file).read()}
        self._orders = NewRows(own / ORDERS)
        self._waiting = [f for f in plan.at_steps_of(learner) if f.number not in self._done]
        self._ends: deque[float] = deque(maxlen=STEPS_MEASURED + 1)  # of steps, undisturbed
        self._slow: tuple[float, float] | None = None  # until when; seconds of a step meanwhile
        self._wakers: list[subprocess.Popen[bytes]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """After a step and all that other callbacks make of it."""
        self._drag()
        self._wakers = [waker for waker in self._wakers if waker.poll() is None]
        step = trainer.global_step
        for order in self._orders.read():
            if order["number"] not in self._done:
                self._fire(pl_module, order["number"], order["kind"], order["options"], step)
        while self._waiting and step >= (self._waiting[0].at_step or 0) and self._open(step):
            fault = self._waiting.pop(0)
            mine = KINDS[fault.kind].inside and fault.target != SYNCER
            other = mine and fault.at_learner != fault.target
            if mine and not other:
                self._fire(pl_module, fault.number, fault.kind, fault.options, step)
            else:
                self._note(fault.number, fault.kind, step, asks=True)

    # ------------------------------------------------------------------ when

    def _open(self, step: int) -> bool:
        left_s = (self._run.max_steps - step) * self._step_s()
        return left_s >= self._guard.min_left_s and self._guard.is_open(self._folder)

    def _step_s(self) -> float:
        """Mean of the last undisturbed steps; the planned floor where none was measured."""
        if len(self._ends) < 2:
            return self._run.step_floor_s
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def _drag(self) -> None:
        """Lengthen this step while the learner is slow; else measure it."""
        now = self._clock()
        if self._slow is not None:
            until, step_s = self._slow
            self._sleep(max(0.0, self._ends[-1] + step_s - now))
            if self._clock() < until:
                self._ends[-1] = self._clock()
                return
            self._slow = None
            self._ends.clear()
        self._ends.append(self._clock())

    # ------------------------------------------------------------------ what

    def _note(self, number: int, kind: str, step: int, asks: bool = False) -> None:
        self._done.add(number)
        row = {"number": number, "kind": kind, "step": step, "wall_s": self._wall(), "asks": asks}
        append(self._done_file, row)

    def _fire(
        self,
        module: pl.LightningModule,
        number: int,
        kind: str,
        options: Mapping[str, Any],
        step: int,
    ) -> None:
        log.warning("chaos: %s at step %d", kind, step)
        self._note(number, kind, step)
        if kind == "kill":
            self._kill(os.getpid(), signal.SIGKILL)
        elif kind == "pause":
            waker = self._stop(os.getpid(), options["seconds"])
            self._wakers += [] if waker is None else [waker]
            self._ends.clear()
        elif kind == "slow":
            self._slow = (self._clock() + options["seconds"], options["factor"] * self._step_s())
        elif kind == "poison":
            poison(module, options["values"])


@torch.no_grad()
def poison(module: pl.LightningModule, values: str) -> None:
    """What a step that diverges leaves: parameters that are `nan`, or `huge`."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.mul_(float("nan") if values == "nan" else HUGE)
