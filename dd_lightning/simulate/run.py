"""`mode=simulate`: one experiment in virtual time, in one process, with the real run's parts.

Nothing of the protocol is decided here: learners, syncer, tape and summary are those of a run of
processes. Step durations come from `simulate.*`, links from `network`, so that a run is as long as
its steps' arithmetic and is repeated exactly by its seed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from msgspec.structs import replace

from dd_lightning.launch.evaluator import INITIAL, Evaluator
from dd_lightning.launch.finish import finish_run
from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.roles import write_configs
from dd_lightning.launch.run import Outcome
from dd_lightning.launch.settings import Settings
from dd_lightning.launch.view import View
from dd_lightning.simulate.learner import VirtualLearner
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.random_state import RandomState
from dd_lightning.simulate.step_time import StepTimes
from dd_lightning.simulate.syncer import VirtualSyncer
from dd_lightning.simulate.virtual_time import Stuck, VirtualTime
from dd_lightning.syncer.checkpoint import checkpoints
from dd_lightning.syncer.settings import SyncerSettings

REFRESH_S = 1.0  # of virtual time: how often the view is looked after
END_S = 60.0  # of virtual time: for the syncer to end once it was told to


@dataclass(slots=True)
class _Evaluations:
    """The evaluator, at the same times of the run as a real one."""

    values: dict[str, Any]
    folder: Path
    evaluator: Evaluator | None = None
    done: Path | None = None
    random: RandomState = field(default_factory=RandomState.current)

    def newest(self, final: bool = False) -> None:
        """Evaluate the newest checkpoint, or version 0 first."""
        found = checkpoints(self.folder / "syncer")
        if not found:
            return
        if self.done is None and found[-1].name.endswith(INITIAL):
            self._evaluate(found[-1], initial=True, final=False)
        if found[0] != self.done or final:
            self._evaluate(found[0], initial=False, final=final)

    def _evaluate(self, file: Path, initial: bool, final: bool) -> None:
        ours = RandomState.current()
        self.random.restore()
        if self.evaluator is None:
            self.evaluator = Evaluator(self.values, self.folder)
        self.evaluator.evaluate(file, initial, final)
        self.done = file
        self.random = RandomState.current()
        ours.restore()


class SimulatedRun:
    """Plays one run; the same arguments and outcome as `launch.run.LocalRun`.

    Args:
        draw: make figures and the report.

    Raises:
        ValueError: a setting of `simulate.*` is wrong, or one is given that has no simulation yet.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        data: pl.LightningDataModule,
        view: View,
        draw: bool = True,
    ) -> None:
        if (chaos := settings.values["chaos"]["name"]) != "none":
            raise ValueError(
                f"chaos is {chaos!r}, which is not built yet under mode=simulate; allowed: none."
            )
        self._draw = draw
        self._settings, self._folder, self._data, self._view = settings, folder, data, view
        values = settings.values
        self.time = VirtualTime()
        self._network = VirtualNetwork(self.time, settings.network, values["seed"])
        times = StepTimes.from_config(values["simulate"])
        self._learners = [
            VirtualLearner(
                index,
                values | {"launcher": values["launcher"] | {"step_floor_s": 0.0}},
                folder / "learners" / str(index),
                self._network,
                times.of(index, values["seed"]),
            )
            for index in range(values["learners"])
        ]
        self._syncer: VirtualSyncer | None = None
        self._evaluations = _Evaluations(values, folder)
        self._interrupt = Interrupt()
        self._outcome = Outcome()

    def execute(self) -> Outcome:
        """Run to the end, whatever it is."""
        for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
            logging.getLogger(name).setLevel(logging.WARNING)
        write_configs(self._settings, self._folder)
        self._data.prepare_data()
        with self._interrupt as interrupt, self._view:
            try:
                self._start()
                self.time.run(lambda: self._over() or interrupt.requested)
            except Stuck as stuck:
                self._fail(str(stuck))
            self._end()
            if interrupt.requested:
                self._outcome.status = "interrupted"
            elif self._outcome.status == "finished":
                self._evaluations.newest(final=True)
            self._outcome.validation_loss = finish_run(
                self._folder, self._outcome.status, draw=self._draw and not interrupt.requested
            )
        return self._outcome

    # ------------------------------------------------------------------ course

    def _start(self) -> None:
        self._syncer = VirtualSyncer(self._syncer_settings(resume=False), self._network)
        self._syncer.start()
        for learner in self._learners:
            learner.start()
        self.time.at(REFRESH_S, self._refresh)
        self.time.at(self._settings.values["evaluate"]["every_s"], self._evaluate)

    def _syncer_settings(self, resume: bool) -> SyncerSettings:
        values = self._settings.values
        aim = (values["logger"] or {}).get("aim")
        config = replace(self._settings.syncer, proxied=False, run_id=f"simulated-{values['seed']}")
        return SyncerSettings(
            listen="virtual",
            run_dir=self._folder,
            resume=resume,
            config=config,
            aim=aim["repo"] if aim else None,
            aim_experiment=aim["experiment"] if aim else "",
        )

    def _over(self) -> bool:
        """The syncer has ended and every learner too; or something has failed."""
        assert self._syncer is not None  # started
        for learner in self._learners:
            if learner.ended and learner.error is not None:
                self._fail(f"learner {learner.name} failed: {learner.error!r}")
                return True
        if self._syncer.actor.ended and self._syncer.actor.error is not None:
            self._fail(f"the syncer failed: {self._syncer.actor.error!r}")
            return True
        return self._syncer.ended and all(learner.ended for learner in self._learners)

    def _refresh(self) -> None:
        self._view.refresh()
        self.time.at(self.time.now + REFRESH_S, self._refresh)

    def _evaluate(self) -> None:
        self._evaluations.newest()
        every_s = self._settings.values["evaluate"]["every_s"]
        self.time.at(self.time.now + every_s, self._evaluate)

    # ------------------------------------------------------------------ end

    def _end(self) -> None:
        """Nobody is left in the middle of something: whoever still runs is told to end."""
        syncer = self._syncer
        if syncer is not None and not syncer.ended:
            syncer.server.request_stop("interrupted" if self._interrupt.requested else "failed")
            deadline = self.time.now + END_S
            try:
                self.time.run(lambda: syncer.ended, deadline)
            except Stuck as stuck:
                self._problem(f"the syncer did not end: {stuck}")
                syncer.kill()
        for learner in self._learners:
            learner.kill()

    @property
    def real_step_seconds(self) -> float:
        """Real seconds of all steps: what the run costs at least."""
        return sum(learner.real_seconds for learner in self._learners)

    def _problem(self, text: str) -> None:
        self._outcome.problems.append(text)
        self._view.say(text)

    def _fail(self, text: str) -> None:
        self._outcome.status = "failed"
        self._problem(text)
