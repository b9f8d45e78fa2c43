"""What the strategy costs a step: a learner's steps against plain Lightning's, in pairs.

The learner trains in this process on one core; the real syncer and proxy are processes on another.
The network is made so that a fragment's transfer takes `TRANSFER_STEPS` steps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.processes import Child, end_all
from dd_lightning.launch.roles import Roles, proxy_host, write_configs
from dd_lightning.launch.settings import Settings, check, parse_listen
from dd_lightning.launch.task import build_data, build_module
from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy
from dd_lightning.protocol.tape import read_tape
from dd_lightning.report.comparison import BYTES_PER_PARAMETER
from dd_lightning.syncer.settings import TAPE

RTT_MS = 200.0
TRANSFER_STEPS = 10
LEAST_STEP_S = 0.02
WARM_UP_STEPS = 40  # left out: allocations, caches, the first rounds
AWAY_AFTER_S = 2.0  # of steps after the warm-up
AWAY_S = 20.0
BACK_S = 6.0  # steps that count after the syncer's return
FIRST_STEPS_S = 60.0  # bound on joining and the warm-up
END_S = 5.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Durations of steps in seconds; the boundary and the data loading are in them.

    `cpu_s` is what all threads of the process used meanwhile: on a core of its own it says the same
    as `seconds`, on a busy machine it still says it.
    """

    seconds: list[float]
    cpu_s: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return len(self.seconds) / sum(self.seconds)

    def percentile(self, percent: int) -> float:
        """Seconds that so many percent of the steps do not exceed."""
        return statistics.quantiles(self.seconds, n=100)[percent - 1]


@dataclass(frozen=True, slots=True)
class Pair:
    """A plain run and a learner's, one after the other."""

    plain: Steps
    learner: Steps

    def ratios(self) -> dict[str, float]:
        """Learner to plain: `rate` (1 is as fast), `p50` and `p99` of a step (1 is as short),
        `cpu` time per step."""
        found = {"rate": self.learner.rate / self.plain.rate}
        ours, plain = (one.cpu_s / len(one.seconds) for one in (self.learner, self.plain))
        found["cpu"] = ours / plain
        for percent in (50, 99):
            ours, plain = (one.percentile(percent) for one in (self.learner, self.plain))
            found[f"p{percent}"] = ours / plain
        return found


def median_ratios(pairs: list[Pair]) -> dict[str, float]:
    """The median over the pairs of each of their ratios."""
    each = [pair.ratios() for pair in pairs]
    return {name: statistics.median(one[name] for one in each) for name in each[0]}


class StepTimes(pl.Callback):
    """Durations from the end of one step to the end of the next, after `WARM_UP_STEPS`."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []  # by the clock, and CPU time so far
        self.warm = threading.Event()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ends.append((time.monotonic(), time.process_time()))
        if len(self.ends) == WARM_UP_STEPS:
            self.warm.set()

    def since(self, moment_s: float = 0.0) -> Steps:
        """Steps that began after `moment_s` (of the monotonic clock) and the warm-up."""
        ends = [end for end in self.ends[WARM_UP_STEPS - 1 :] if end[0] >= moment_s]
        seconds = [later[0] - end[0] for end, later in itertools.pairwise(ends)]
        return Steps(seconds, ends[-1][1] - ends[0][1])


class Overhead:
    """Makes runs of one task, plain and as a learner, that differ in the strategy only.

    Args:
        values: a composed experiment; `task`, `algorithm`, `trainer` and `timeouts` are used.
        folder: for the runs' folders.
        steps: that count in each run.
        cores: of the learner, and of syncer and proxy.
    """

    def __init__(
        self, values: Mapping[str, Any], folder: Path, steps: int, cores: tuple[int, int]
    ) -> None:
        timeouts = values["timeouts"] | {"rejoin": AWAY_S + 60.0}
        self._values = dict(values) | {"learners": 1, "logger": {}}
        self._values["timeouts"] = timeouts
        self._folder, self._steps, self._cores = folder, steps, cores
        self.merges: list[int] = []  # of each learner's run
        os.sched_setaffinity(0, {cores[0]})
        build_data(self._values).prepare_data()

    @property
    def fragment_bytes(self) -> float:
        """Mean size of a fragment."""
        parameters = sum(p.numel() for p in build_module(self._values).parameters())
        return parameters * BYTES_PER_PARAMETER / self._values["algorithm"]["fragments"]

    def plain(self) -> Steps:
        """A run of plain Lightning.

        Raises:
            ValueError: a step takes less than `LEAST_STEP_S`.
        """
        times = StepTimes()
        self._fit("auto", times, self._steps)
        steps = times.since()
        if (median_s := steps.percentile(50)) < LEAST_STEP_S:
            raise ValueError(
                f"a step takes {median_s * 1e3:.1f} ms; allowed: at least {LEAST_STEP_S * 1e3:g} "
                "ms, with a larger task.data.batch_size."
            )
        return steps

    def learner(self, step_s: float, away: str | None = None) -> Steps:
        """A run with the strategy; its steps from the moment on that the syncer goes away.

        Args:
            step_s: duration of a step, from which the bandwidth follows.
            away: None, or "stop" or "kill": that is done to the syncer for `AWAY_S`.
        """
        steps = self._steps
        if away is not None:
            steps = max(steps, round((AWAY_AFTER_S + AWAY_S + BACK_S) / step_s))
        values = self._values | {"network": network(self.fragment_bytes, step_s)}
        folder = self._folder / str(len(self.merges))
        syncer = AwaySyncer(check(values), folder, self._cores[1])
        times = StepTimes()
        with syncer.running() as (address, via), _environment("DD_VIA", via):
            strategy = DecoupledDiLoCoStrategy(address, learner="0", data="none")
            with syncer.outage(away, times.warm):
                self._fit(strategy, times, steps)
        self.merges.append(sum(e["event"] == "merge" for e in read_tape(folder / TAPE)))
        return times.since(syncer.away_since_s)

    def _fit(self, strategy: Any, times: StepTimes, steps: int) -> None:
        pl.seed_everything(self._values["seed"], workers=True)
        trainer = pl.Trainer(
            **self._values["trainer"] | {"max_steps": steps + WARM_UP_STEPS},
            devices=1,
            strategy=strategy,
            callbacks=[times],
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(build_module(self._values), datamodule=build_data(self._values))


class AwaySyncer:
    """Syncer and proxy as the launcher starts them, on one core; the syncer can go away."""

    def __init__(self, settings: Settings, folder: Path, core: int) -> None:
        self.away_since_s = 0.0
        self._roles = Roles(settings, folder, Interrupt())
        self._folder, self._core = folder, core
        self._children: list[Child] = []
        self._over = threading.Event()
        write_configs(settings, folder)

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[str, str]]:
        """The address that the learner dials, and the proxy's host."""
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})  # children inherit it
        try:
            self._children.append(self._roles.start_syncer())
            self._roles.syncer_ready(self._children[0])
            self._children.append(self._roles.start_proxy())
            self._roles.proxy_ready(self._children[1])
            os.sched_setaffinity(0, own)
            host = proxy_host("0")
            yield f"tcp://{host}:{parse_listen(self._roles.address)[1]}", host
        finally:
            os.sched_setaffinity(0, own)
            end_all([[child] for child in self._children], END_S, END_S)

    @contextlib.contextmanager
    def outage(self, kind: str | None, warm: threading.Event) -> Iterator[None]:
        """In the block, once `warm`, the syncer is away for `AWAY_S`; None: never."""
        thread = threading.Thread(target=self._go_away, args=(kind, warm), daemon=True)
        if kind is not None:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            if kind is not None:
                thread.join(END_S)

    def _go_away(self, kind: str, warm: threading.Event) -> None:
        """`kind` is the outage's; the thread lives to the block's end, for the kernel ends a
        child with the thread that started it."""
        os.sched_setaffinity(0, {self._core})
        if not warm.wait(FIRST_STEPS_S) or self._over.wait(AWAY_AFTER_S):
            return
        self.away_since_s = time.monotonic()
        syncer = self._children[0]
        if kind == "stop":
            os.killpg(syncer.pid, signal.SIGSTOP)
        else:
            syncer.kill()
        self._over.wait(AWAY_S)
        if kind == "stop":
            os.killpg(syncer.pid, signal.SIGCONT)
        else:
            self._children[0] = self._roles.start_syncer(resume=True)
        self._over.wait()


def network(fragment_bytes: float, step_s: float) -> dict[str, Any]:
    """A link of `RTT_MS` on which a fragment's transfer takes `TRANSFER_STEPS` steps."""
    mbit_s = fragment_bytes * 8e-6 / (TRANSFER_STEPS * step_s)
    link = {"rtt_ms": RTT_MS, "mbit_s": mbit_s, "tcp": "none", "slow_start": False}
    return {
        "name": "bench",
        "regions": ["learner", "syncer"],
        "syncer_region": "syncer",
        "learner_regions": ["learner"],
        "links": {"learner-syncer": link},
    }


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
