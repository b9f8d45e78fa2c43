"""Runs of `mode=simulate` in the test's own process: a tiny model, a few dozen steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch.run import Outcome
from dd_lightning.launch.settings import Settings, check
from dd_lightning.launch.task import check_task
from dd_lightning.simulate.run import SimulatedRun

QUICK = (  # of any task
    "experiment=smoke",
    "mode=simulate",
    "launcher.step_floor_s=0",
    "algorithm.sync_every=6",
    "algorithm.fragments=3",
    "checkpoint.every_s=0.5",
    "evaluate.every_s=100",
    "logger=csv",
    "chaos.min_left_s=0",
    "simulate.restart_s=0.5",
)
TINY = (
    *QUICK,
    "task.module.gpt.width=32",
    "task.data.batch_size=1",
    "task.data.max_bytes=300000",
    "task.data.validation_samples=8",
)


class Silent:
    """A view that shows nothing and keeps what was said.

    Args:
        refreshed: called ten times a second of virtual time.
    """

    def __init__(self, refreshed: Callable[[], None] = lambda: None) -> None:
        self.said: list[str] = []
        self.refresh = refreshed

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        self.said.append(text)


def settings_of(data: Path, *overrides: str, base: Sequence[str] = TINY) -> Settings:
    """Checked settings of `base` with overrides."""
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [*base, f"task.data.cache_dir={data}", *overrides])
    return check(OmegaConf.to_container(config, resolve=True))


def prepare(settings: Settings, folder: Path, view: Silent) -> SimulatedRun:
    """A run that is about to begin."""
    data = check_task(settings.values, settings.syncer.num_data_slots)
    return SimulatedRun(settings, folder, data, view, draw=False)


def simulate(data: Path, folder: Path, *overrides: str, base: Sequence[str] = TINY) -> Outcome:
    """Play `base` with overrides in `folder`; it must end well."""
    outcome = prepare(settings_of(data, *overrides, base=base), folder, Silent()).execute()
    assert outcome.status == "finished" and not outcome.problems, outcome.problems
    return outcome
