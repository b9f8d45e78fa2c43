"""Starts the processes of a simulated run: each life of a learner, each start of the syncer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.roles import Roles
from dd_lightning.launch.settings import Settings
from dd_lightning.simulate.faults import VirtualDisk
from dd_lightning.simulate.learner import VirtualLearner
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.step_time import StepTimes
from dd_lightning.simulate.syncer import VirtualSyncer
from dd_lightning.syncer.settings import SyncerSettings


class VirtualRoles(Roles):
    """As `Family` uses them.

    Args:
        disk: under the syncer's checkpoints.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        interrupt: Interrupt,
        network: VirtualNetwork,
        disk: VirtualDisk,
    ) -> None:
        super().__init__(settings, folder, interrupt)
        values = settings.values
        self._network, self._disk = network, disk
        self._times = StepTimes.from_config(values["simulate"])
        self._values = values | {"launcher": values["launcher"] | {"step_floor_s": 0.0}}
        self._durations: dict[str, Iterator[float]] = {}
        self._lives: Counter[str] = Counter()
        self.learners: list[VirtualLearner] = []  # every life

    def start_syncer(self, resume: bool = False, nice: int = 0) -> VirtualSyncer:
        """A start of it, which serves from now on."""
        del nice
        self._lives["syncer"] += 1
        syncer = VirtualSyncer(
            self._syncer_settings(resume), self._network, self._lives["syncer"], self._disk
        )
        syncer.start()
        return syncer

    def start_learner(self, learner: str, nice: int = 0) -> VirtualLearner:
        """A life of one learner, which begins now."""
        del nice
        index, seed = int(learner), self.settings.values["seed"]
        self._lives[learner] += 1
        if learner not in self._durations:
            self._durations[learner] = self._times.of(index, seed)
        life = VirtualLearner(
            index,
            self._lives[learner],
            self._values,
            self.folder / "learners" / learner,
            self._network,
            self._durations[learner],
            self.settings.faults,
        )
        self.learners.append(life)
        life.start()
        return life

    def _syncer_settings(self, resume: bool) -> SyncerSettings:
        values = self.settings.values
        run_id = f"simulated-{values['seed']}"
        return SyncerSettings(
            listen="virtual",
            run_dir=self.folder,
            resume=resume,
            config=replace(self.settings.syncer, proxied=False, run_id=run_id),
            loggers=self.settings.loggers,
        )
