"""Syncer and learner as forked processes that die at named points.

A fork server imports torch and Lightning once; a role is then a real process within milliseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dd_lightning import DecoupledDiLoCoStrategy, crash_points
from dd_lightning.launch.step_floor import StepFloor
from dd_lightning.learner.own_checkpoint import newest_whole
from dd_lightning.syncer import command
from tests.trainers import QUIET, Regression, loader

WAIT_S = 90.0  # on every wait for a process, for a busy machine
STEPS, TOKENS = 60, 4  # of a learner; of a step
FLOOR_S = 0.015  # of a step
SETTINGS = (
    "learners=2",
    f"max_steps={STEPS}",
    "checkpoint_every_s=0.1",
    "checkpoint_keep=1",
    "algorithm=short_run",
    "algorithm.fragments=2",
    "algorithm.sync_every=6",
    "algorithm.quorum=2",
    "algorithm.min_learners=2",
    "timeouts.reanchor=20",
    "timeouts.rejoin=4",
    "timeouts.resume=60",
    "timeouts.shutdown=30",
)
_forks = multiprocessing.get_context("forkserver")


def _process(target: Any, *arguments: Any) -> ForkServerProcess:
    _forks.set_forkserver_preload(["tests.crash_roles"])
    return _forks.Process(target=target, args=arguments, daemon=True)


def _become(folder: Path, name: str, plan: str) -> None:
    """This fork is a role now: armed, and with its output in files."""
    for descriptor, ending in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    torch.set_num_threads(1)
    fired = str(folder / "fired.jsonl")
    crash_points.arm(crash_points.Armed(plan, fired) if plan else None)


def be_syncer(folder: Path, name: str, plan: str, arguments: tuple[str, ...]) -> None:
    """`dd-lightning syncer`."""
    _become(folder, name, plan)
    code = command.main(["--run-dir", str(folder / "run"), *SETTINGS, *arguments])
    sys.stdout.flush()
    os._exit(code)


def be_learner(folder: Path, learner: str, plan: str, address: str) -> None:
    """Trains to its last step, from its newest checkpoint where there is one."""
    _become(folder, f"learner{learner}", plan)
    train(folder, learner, address)
    os._exit(0)


def train(folder: Path, learner: str, address: str, steps: int = STEPS) -> None:
    """One learner's fit, with a checkpoint of its own every ten steps."""
    own = folder / f"learner{learner}"
    own.mkdir(exist_ok=True)
    saves = ModelCheckpoint(own, every_n_train_steps=10, save_top_k=1, monitor=None)
    trainer = Trainer(
        **QUIET | {"enable_checkpointing": True},
        strategy=DecoupledDiLoCoStrategy(address, learner=learner, data="none"),
        max_steps=steps,
        callbacks=[StepFloor(FLOOR_S), saves],
    )
    trainer.fit(
        Regression(int(learner)),
        loader(int(learner), batch_size=TOKENS),
        ckpt_path=newest_whole(own),
        weights_only=False,
    )


class Role:
    """One life of a role."""

    def __init__(self, process: ForkServerProcess) -> None:
        self.process = process
        process.start()

    def died(self) -> bool:
        """Whether it was killed; waits for its end, however it ends."""
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, "it does not end"
        return self.process.exitcode == -9

    def kill(self) -> None:
        """What a failed test leaves."""
        self.process.kill()
        self.process.join(WAIT_S)


class Syncer(Role):
    """One start of the syncer: `plan` is where it dies, "" nowhere."""

    def __init__(self, folder: Path, number: int, plan: str = "", port: int = 0) -> None:
        self._out = folder / f"syncer{number}.out"
        arguments = (f"--listen=tcp://127.0.0.1:{port}", *(["--resume"] if number > 1 else []))
        super().__init__(_process(be_syncer, folder, f"syncer{number}", plan, arguments))

    def said(self) -> dict[str, Any]:
        """Its line, once it listens; {} when it dies before."""
        deadline = time.monotonic() + WAIT_S
        while not (self._out.exists() and self._out.read_text().endswith("\n")):
            if not self.process.is_alive():
                break
            assert time.monotonic() < deadline, "the syncer does not listen"
            time.sleep(0.01)
        text = self._out.read_text() if self._out.exists() else ""
        return json.loads(text) if text.endswith("\n") else {}


class Learner(Role):
    """One life of a learner's process."""

    def __init__(self, folder: Path, learner: str, address: str, plan: str = "") -> None:
        super().__init__(_process(be_learner, folder, learner, plan, address))
