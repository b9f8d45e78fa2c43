"""What donating costs a step: a donor's steps during transfers of its inner state against the rest.

The donor trains in this process on one core; the real syncer and a receiver are processes on
another. The receiver has no model: it joins, takes the state to the last byte, leaves, and joins
again. Run as a module this file is the receiver.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from msgspec.structs import replace

from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.overhead import END_S, FIRST_STEPS_S, WARM_UP_STEPS, StepTimes
from dd_lightning.launch.processes import Child, end_all, scrubbed_environment
from dd_lightning.launch.roles import Roles, write_configs
from dd_lightning.launch.settings import check
from dd_lightning.launch.task import build_data, build_module
from dd_lightning.learner.inner_state import InnerState
from dd_lightning.learner.snapshots import ModelValues
from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy
from dd_lightning.protocol.messages import Inner, Join, StateChunk, StateReceived, Welcome
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.rendezvous import lookup

RECEIVER = "receiver"
EVERY_S = 0.4  # between two transfers
POLL_S = 0.02
MESSAGE_BYTES = 1 << 30


class Donating:
    """One run of one task with transfers again and again.

    Args:
        values: a composed experiment; `task`, `algorithm`, `trainer` and `timeouts` are used.
        cores: of the donor, and of syncer and receiver.
    """

    def __init__(
        self, values: Mapping[str, Any], folder: Path, steps: int, cores: tuple[int, int]
    ) -> None:
        algorithm = values["algorithm"] | {"max_learners": 2}
        self._values = dict(values) | {"learners": 1, "logger": {}, "algorithm": algorithm}
        self._folder, self._steps, self._cores = folder, steps, cores
        os.sched_setaffinity(0, {cores[0]})
        build_data(self._values).prepare_data()

    def measure(self) -> dict[str, Any]:
        """Ratios (1: as long) of p50 and p99: steps that a transfer overlaps to the others."""
        settings = check(self._values)
        roles = Roles(settings, self._folder, Interrupt())
        write_configs(settings, self._folder)
        os.sched_setaffinity(0, {self._cores[1]})  # children inherit it
        children: list[Child] = []
        times = StepTimes()
        try:
            children.append(roles.start_syncer())
            roles.syncer_ready(children[0])
            start = _StartReceiver(self._folder, roles.address, self._cores[1], children)
            os.sched_setaffinity(0, {self._cores[0]})
            self._fit(
                DecoupledDiLoCoStrategy(roles.address, learner="0", data="none"), times, start
            )
        finally:
            os.sched_setaffinity(0, {self._cores[0]})
            end_all([[child] for child in reversed(children)], END_S, END_S)
        return _compare(times, _transfers(self._folder))

    def _fit(self, strategy: Any, *callbacks: pl.Callback) -> None:
        pl.seed_everything(self._values["seed"], workers=True)
        limit = {"max_steps": self._steps + WARM_UP_STEPS}
        trainer = pl.Trainer(
            **self._values["trainer"] | limit, devices=1, strategy=strategy, logger=False,
            callbacks=list(callbacks), enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(build_module(self._values), datamodule=build_data(self._values))


class _StartReceiver(pl.Callback):
    """Starts the receiver after the warm-up: it needs the donor's layout and its optimizer."""

    def __init__(self, folder: Path, address: str, core: int, children: list[Child]) -> None:
        self._folder, self._address, self._core = folder, address, core
        self._children = children

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step != WARM_UP_STEPS:
            return
        join = Join(
            learner=RECEIVER, incarnation="-", number=1, tensors=ModelValues(module).infos,
            wants_state=True,
        )  # fmt: skip
        template = self._folder / "join.json"
        template.write_bytes(msgspec.json.encode(join))
        optimizer = InnerState(module, trainer.optimizers).description
        command = [sys.executable, "-m", "dd_lightning.launch.donating"]
        command += [self._address, str(template), optimizer]
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        log = self._folder / "receiver.log"
        self._children.append(Child(RECEIVER, command, log, scrubbed_environment(1)))
        os.sched_setaffinity(0, own)


def _transfers(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "receiver.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _compare(times: StepTimes, transfers: list[dict[str, float]]) -> dict[str, Any]:
    ends = [end for end, _ in times.ends[WARM_UP_STEPS:]]
    within: list[float] = []
    outside: list[float] = []
    for begin, end in itertools.pairwise(ends):
        overlaps = any(t["begin_s"] < end and begin < t["end_s"] for t in transfers)
        (within if overlaps else outside).append(end - begin)
    if min(len(within), len(outside)) < 100:
        raise ValueError(
            f"{len(within)} steps with a transfer and {len(outside)} without; allowed: at least "
            "100 of each, with more --steps."
        )
    cuts = [statistics.quantiles(steps, n=100) for steps in (within, outside)]
    return {
        "p50": cuts[0][49] / cuts[1][49],
        "p99": cuts[0][98] / cuts[1][98],
        "steps": [len(within), len(outside)],
        "step_s_p50": [cuts[0][49], cuts[1][49]],
        "step_s_p99": [cuts[0][98], cuts[1][98]],
        "transfers": len(transfers),
        "bytes": transfers[0]["bytes"],
        "transfer_s_p50": statistics.median(t["end_s"] - t["begin_s"] for t in transfers),
    }


def receive(address: str, template: Join, optimizer: str) -> None:
    """Take the state once; a line of JSON says when (monotonic clock) and how many bytes."""
    channel = LearnerChannel(lookup(address, FIRST_STEPS_S), max_message_bytes=MESSAGE_BYTES)
    generation, begin_s, num_bytes = 0, 0.0, 0
    channel.send(replace(template, incarnation=uuid.uuid4().hex))
    deadline = time.monotonic() + FIRST_STEPS_S
    try:
        while time.monotonic() < deadline:
            for event in channel.poll(POLL_S):
                message = getattr(event, "message", None)
                if isinstance(message, Welcome):
                    generation, begin_s = message.generation, time.monotonic()
                    channel.send(Inner(generation=generation, optimizer=optimizer))
                elif isinstance(message, StateChunk):
                    num_bytes += message.payload.num_bytes
                    channel.send(
                        StateReceived(
                            generation=generation, transfer=message.transfer,
                            chunks=message.chunk + 1,
                        )
                    )  # fmt: skip
                    if message.last:
                        row = {"begin_s": begin_s, "end_s": time.monotonic(), "bytes": num_bytes}
                        print(json.dumps(row), flush=True)
                        return
                elif message is None:
                    return  # the run is over, or the id is still held
    finally:
        channel.close()


def main() -> None:
    """The receiver: transfers until it is ended."""
    address, template, optimizer = sys.argv[1:]
    join = msgspec.json.decode(Path(template).read_bytes(), type=Join)
    while True:
        receive(address, join, optimizer)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
