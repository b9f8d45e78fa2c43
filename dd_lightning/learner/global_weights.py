"""Evaluates the newest Θ that a learner has, before its own weights, at every validation of a fit.

The module's weights are exchanged for Θ and back, bit for bit, between two steps; nothing is saved
or sent in between, since no callback and no step boundary runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from dd_lightning.learner.snapshots import ModelValues
from dd_lightning.learner.traffic import Traffic

PREFIX = "global/"  # of the names of metrics of Θ


class GlobalWeights:
    """Puts Θ into the module and the learner's own values back.

    Takes one more copy of the travelling tensors in host memory while Θ is in.

    Args:
        settle: finishes what still reads the module's values.
    """

    def __init__(self, values: ModelValues, traffic: Traffic, settle: Callable[[], None]) -> None:
        self._values, self._traffic, self._settle = values, traffic, settle
        self.section: Callable[[], AbstractContextManager[None]] = nullcontext  # a group's
        self._own: dict[int, Mapping[str, Tensor]] = {}

    def swap(self) -> None:
        """Θ in, or the learner's own back."""
        with self.section():
            self._settle()
            self._exchange()

    def _exchange(self) -> None:
        if self._own:
            own, self._own = self._own, {}
            for fragment, tensors in own.items():
                self._values.write(fragment, tensors)
            return
        theta = dict(self._traffic.theta)  # what comes from now on is for the next time
        self._own = {fragment: self._values.read_whole(fragment) for fragment in theta}
        for fragment, tensors in theta.items():
            self._values.write(fragment, tensors)


class GlobalValidation:
    """Runs a fit's validation loop a second time, on Θ, with names of metrics of its own.

    Callbacks take no part in it, so none is called twice and none saves Θ; loggers and
    `callback_metrics` get what the module logs, as "global/NAME". They get it first: a callback
    that watches "global/val_loss" finds it in the validation of the learner's own weights.

    Args:
        pause: called before: what the syncer asks for is answered with the learner's own weights.
        swap: exchanges the module's weights for Θ, and back.
    """

    def __init__(self, trainer: Any, pause: Callable[[], None], swap: Callable[[], None]) -> None:
        self.is_running = False
        self._trainer, self._pause, self._swap = trainer, pause, swap
        self._loop = trainer.fit_loop.epoch_loop.val_loop
        self._run = self._loop.run
        self._loop.run = self._run_both

    def close(self) -> None:
        """Leave the loop as it was."""
        vars(self._loop).pop("run", None)

    def _run_both(self) -> Any:
        trainer, module = self._trainer, self._trainer.lightning_module
        callbacks, log = trainer.callbacks, module.log

        def log_global(name: str, *arguments: Any, **options: Any) -> None:
            log(f"{PREFIX}{name}", *arguments, **options)

        self.is_running = True
        self._pause()
        self._swap()
        trainer.callbacks, module.log = [], log_global
        try:
            self._run()
        finally:
            trainer.callbacks = callbacks
            vars(module).pop("log", None)
            self._swap()
            self.is_running = False
        return self._run()
