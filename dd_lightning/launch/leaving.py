"""A learner's process that is told to end: state written, goodbye said, gone within seconds.

SIGTERM and SIGINT are one thing here: Lightning ends the training loop between two steps, so that
what is written is whole. Before the loop begins there is nothing to write, and either ends the
process at once. Lost: the tokens that no merge has, as the ledger's `unsent`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dd_lightning.launch.learner_kind import own_rank
from dd_lightning.launch.supervision import FINISHED_CODE, LEFT_CODE


class Checkpoints(ModelCheckpoint):
    """Lightning's own, which also writes when the process is told to end.

    Not at other exceptions: what a step left half done is no state to go on from.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, save_on_exception=True)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)


def run_until_told(train: Callable[[], None]) -> None:
    """Run `train`; where a signal ends it in order, end the process with code `LEFT_CODE`.

    Ranks of a group other than the first end with 0: to Lightning's first rank, which watches
    them, any other code means that they are lost, and it would be killed over its checkpoint.
    """
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        train()
    except (SIGTERMException, InterruptedError) as error:  # the second: while joining
        logging.getLogger(__name__).info("left: %s", error or "told to end")
        _leave_at_once()


def _leave_at_once() -> NoReturn:
    """All is written: Python's own way out would take seconds with torch loaded."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LEFT_CODE if own_rank() == 0 else FINISHED_CODE)
