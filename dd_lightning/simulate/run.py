"""`mode=simulate`: one experiment in virtual time, in one process, with the real run's parts.

Nothing of the protocol, of supervision or of chaos is decided here: this is the launcher's own
run, whose processes, clock, network and disk are virtual. Step durations come from `simulate.*`,
links from `network`, so that a run is as long as its steps' arithmetic and is repeated exactly by
its seed.
"""

from __future__ import annotations

import logging
import time as real_time
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl

from dd_lightning.launch.chaos import RunChaos
from dd_lightning.launch.family import Family
from dd_lightning.launch.rejoins import SYNCER, learner_role
from dd_lightning.launch.run import END_STAGE_S, LocalRun, Outcome
from dd_lightning.launch.settings import Settings
from dd_lightning.launch.supervision import Supervisor
from dd_lightning.launch.view import View
from dd_lightning.report.read import TAPE
from dd_lightning.simulate.evaluations import Evaluations
from dd_lightning.simulate.faults import VirtualDisk
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.presence import JOIN, Move, Presence
from dd_lightning.simulate.processes import VirtualChildren
from dd_lightning.simulate.roles import VirtualRoles
from dd_lightning.simulate.virtual_time import VirtualTime

MOVE_POLL_S = 0.1  # of virtual time: how often a learner that is away is looked for, to leave
END_REAL_S = 1.5  # of real time, for each of two stages: an interrupted run ends within 5 s


class SimulatedRun(LocalRun):
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
        _check(settings)
        self.time = VirtualTime()
        self._presence = Presence.from_config(settings.values)
        self._moves = list(self._presence.moves)  # those still to come
        super().__init__(settings, folder, data, view)
        self._draws = draw
        self._evaluations = Evaluations(settings.values, folder)

    def execute(self) -> Outcome:
        """Run to the end, whatever it is."""
        for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
            logging.getLogger(name).setLevel(logging.WARNING)
        return super().execute()

    @property
    def real_step_seconds(self) -> float:
        """Real seconds of all steps: what the run costs at least."""
        return sum(life.step_cost[0] for life in self._virtual.learners)

    @property
    def cpu_step_seconds(self) -> float:
        """Processor seconds of all steps: the same on a busy machine."""
        return sum(life.step_cost[1] for life in self._virtual.learners)

    # ------------------------------------------------------------------ in place of the real ones

    def _prepare(self) -> None:
        settings, folder, say = self._settings, self._folder, self._view.say
        controlled = settings.learner_ids if settings.faults.needs_proxy else ()
        seed = settings.values["seed"]
        network = VirtualNetwork(self.time, settings.network, seed, controlled)
        disk, clock = VirtualDisk(), self.time.clock
        self._virtual = VirtualRoles(settings, folder, self._interrupt, network, disk)
        supervisor = Supervisor(settings.max_restarts, settings.restart_after_s)
        self._family = Family(self._virtual, supervisor, folder / TAPE, say, clock)
        children = VirtualChildren(self._family.at_work, network.control)
        self._chaos = RunChaos(settings.faults, folder, children, say, disk, clock, clock)

    def _clock(self) -> float:
        return self.time.now

    def _sleep(self, seconds: float) -> None:
        self.time.play(self.time.now + seconds, lambda: self._interrupt.requested)

    def _start(self) -> None:
        self._chaos.begin()
        self._family.start(SYNCER)
        for learner in self._presence.first:
            self._family.start(learner_role(learner))
        for move in self._presence.moves:
            self.time.at(move.at_s, lambda move=move: self._move(move))
        self._evaluate_later()

    def _check_alone(self) -> None:
        if not self._moves:  # else somebody may still come
            super()._check_alone()

    def _last_evaluation(self) -> None:
        for move in self._moves:
            self._view.say(
                f"warning: simulate.{move.what}s.{move.learner} has no effect: the run was over "
                f"before {move.at_s:g} s"
            )
        if self._outcome.status == "finished" and not self._interrupt.requested:
            self._evaluations.newest(final=True)

    def _end(self) -> None:
        """Learners leave, then the syncer ends, as on SIGTERM; who takes long is killed."""
        for stage in (lambda role: role != SYNCER, lambda role: role == SYNCER):
            self._end_stage(stage)

    # ------------------------------------------------------------------ pieces

    def _end_stage(self, belongs: Callable[[str], bool]) -> None:
        stage = [child for role, child in self._family.children.items() if belongs(role)]
        for child in stage:
            child.terminate()
        until = real_time.monotonic() + END_REAL_S
        while real_time.monotonic() < until and any(one.exit_code() is None for one in stage):
            self.time.play(self.time.now + END_STAGE_S, lambda: real_time.monotonic() > until)
        for child in stage:
            if child.exit_code() is None:
                self._view.say(f"{child.name} did not end within {END_REAL_S:g} s and was killed")
                child.kill()

    def _move(self, move: Move) -> None:
        """A learner joins or is told to leave; one that is away leaves once it is back."""
        role = learner_role(move.learner)
        child = self._family.children.get(role)
        if self._ended or move not in self._moves:
            return
        if move.what == JOIN and child is None and role not in self._family.waiting:
            self._family.start(role)
        elif move.what != JOIN and child is not None and self._family.at_work(role) is child:
            child.terminate()
        else:
            self.time.at(self.time.now + MOVE_POLL_S, lambda: self._move(move))
            return
        self._moves.remove(move)

    def _evaluate_later(self) -> None:
        every_s = self._settings.values["evaluate"]["every_s"]
        self.time.at(self.time.now + every_s, self._evaluate)

    def _evaluate(self) -> None:
        self._evaluations.newest()
        self._evaluate_later()


def _check(settings: Settings) -> None:
    """Refuse what is not built in virtual time.

    Raises:
        ValueError: it names the setting.
    """
    if settings.resume is not None:
        raise ValueError(
            f"launcher.resume is {settings.resume!r}; allowed under mode=simulate: null. A "
            "simulated run is repeated exactly by its seed instead."
        )
