"""Brings learning-rate schedulers that begin anew to the step that their learner starts at."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def advance(trainer: Any, steps: int) -> None:
    """Step every scheduler of `trainer` as often as `steps` inner steps of an undisturbed learner
    would have, so that the next step has the learning rate that its own next one has.

    Lightning's `interval` and `frequency` are followed, with the batches of this learner's epochs.
    A scheduler that watches a metric (ReduceLROnPlateau) starts anew: what it would have seen is
    known to nobody. Under manual optimization the module steps its schedulers itself.
    """
    if steps <= 0 or not trainer.lr_scheduler_configs:
        return
    if not trainer.lightning_module.automatic_optimization:
        warnings.warn(
            f"this learner starts at step {steps} of the run, but under manual optimization its "
            "schedulers are the module's to step: they begin at 0.",
            stacklevel=2,
        )
        return
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            warnings.warn(
                f"this learner starts at step {steps} of the run; its "
                f"{type(config.scheduler).__name__} starts anew, because what it watches was not "
                "measured here.",
                stacklevel=2,
            )
            continue
        _step(config.scheduler, _count(trainer, config, steps))


def _step(scheduler: Any, times: int) -> None:
    """Without torch's warnings that no optimizer step came first: those were made elsewhere."""
    for inner in _with_parts(scheduler):
        inner.optimizer._opt_called = True  # type: ignore[attr-defined]
    for _ in range(times):
        scheduler.step()


def _with_parts(scheduler: Any) -> Iterator[LRScheduler]:
    """The scheduler, or those that it is made of (SequentialLR, ChainedScheduler)."""
    yield from getattr(scheduler, "_schedulers", [])
    if hasattr(scheduler, "optimizer"):
        yield scheduler


def _count(trainer: Any, config: Any, steps: int) -> int:
    """How often Lightning steps this scheduler in the first `steps` optimizer steps."""
    batches, every = trainer.num_training_batches, trainer.accumulate_grad_batches
    frequency = config.frequency
    per_epoch = math.inf if math.isinf(batches) else math.ceil(batches / every)
    epochs, rest = (0, steps) if math.isinf(per_epoch) else divmod(steps, int(per_epoch))
    if config.interval == "epoch":
        return epochs // frequency
    if frequency == 1:
        return steps

    def within(count: int) -> int:
        """Of the first `count` steps of an epoch; Lightning looks at the number of the batch."""
        numbers = (min((index + 1) * every, batches) for index in range(count))
        return sum(number % frequency == 0 for number in numbers)

    return (epochs * within(int(per_epoch)) if epochs else 0) + within(rest)
