"""Trainers as threads behind the shaping proxy, whose links a test cuts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.network import WanProfile
from dd_lightning.network.proxy import Route, ShapingProxy
from tests.trainers import WAIT_S, Regression, fit_plain, loader


def address_of(learner: str) -> str:
    """Of its proxy."""
    return f"127.0.1.{int(learner) + 1}"


class ProxyThread:
    """A controlled proxy between a syncer and its learners, in a thread of its own."""

    def __init__(self, run_dir: Path, learners: Sequence[str], link: dict[str, Any]) -> None:
        ports = json.loads((run_dir / "syncer" / "ports.json").read_text())
        self.store = ports["store"]
        profile = WanProfile.from_config(
            {"name": "test", "regions": ["a", "b"], "syncer_region": "b", "outages": ()}
            | {"links": {"a-b": link}, "learner_regions": ["a"]}
        )
        both = (ports["store"], ports["channel"])
        routes = [Route(name, address_of(name), both, "127.0.0.1", "a") for name in learners]
        self._proxy = ShapingProxy(profile, routes, controlled=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._proxy.start())

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def order(self, learners: Sequence[str], **command: Any) -> float:
        """Begin the same fault of each (`network/control.py`); the wall time."""

        async def begin() -> None:
            for learner in learners:
                self._proxy.control({"learner": learner, **command})

        self._run(begin())
        return time.time()

    def address(self, learner: str) -> str:
        """Where this learner finds the syncer."""
        return f"tcp://{address_of(learner)}:{self.store}"

    def close(self) -> None:
        self._run(self._proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


class Paced(pl.Callback):
    """Steps take at least so long; training ends when the event is set."""

    def __init__(self, step_s: float, ended: threading.Event) -> None:
        self.step_s, self.ended, self.steps = step_s, ended, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        time.sleep(self.step_s)
        self.steps = trainer.global_step
        trainer.should_stop = trainer.should_stop or self.ended.is_set()


class Trainers:
    """Learners in threads, until `finish`; the first error is raised there."""

    def __init__(self, proxy: ProxyThread, learners: Sequence[str], step_s: float) -> None:
        self._ended = threading.Event()
        self._errors: list[BaseException] = []
        self._paced = {name: Paced(step_s, self._ended) for name in learners}
        self._threads = [
            threading.Thread(target=self._fit, args=(proxy.address(name), name), daemon=True)
            for name in learners
        ]
        for thread in self._threads:
            thread.start()

    def _fit(self, address: str, name: str) -> None:
        try:
            strategy = DecoupledDiLoCoStrategy(address, learner=name)
            fit_plain(Regression(), loader(int(name)), -1, strategy, [self._paced[name]])
        except BaseException as error:
            self._errors.append(error)

    def steps(self, learner: str) -> int:
        """Optimizer steps that it has done."""
        return self._paced[learner].steps

    def finish(self) -> None:
        """Let each make its last step and hand in."""
        self._ended.set()
        for thread in self._threads:
            thread.join(1.5 * WAIT_S)
            assert not thread.is_alive(), "a learner does not end"
        if self._errors:
            raise self._errors[0]
