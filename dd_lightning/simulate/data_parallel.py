"""`algorithm=data_parallel` under `mode=simulate`: one experiment in virtual time, in one process.

The module, optimizer, precision and schedule are those of a real `Trainer.fit`, whose strategy
makes the steps of all members (`data_parallel_step`); how long they take, and what failures cost,
is `data_parallel_time`'s. A job that goes back to its checkpoint is a new `Trainer.fit` from it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from dd_lightning.algorithm import canonical_name
from dd_lightning.launch.data_parallel import DataParallel
from dd_lightning.launch.finish import finish_run
from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.learner import CHECKPOINTS
from dd_lightning.launch.roles import write_configs
from dd_lightning.launch.run import Outcome
from dd_lightning.launch.settings import Settings
from dd_lightning.launch.task import build_data, build_module, takes_slots
from dd_lightning.launch.view import View
from dd_lightning.network.control import unshaped
from dd_lightning.protocol.tape import TapeWriter
from dd_lightning.report.read import TAPE
from dd_lightning.simulate.data_parallel_faults import FaultTimes
from dd_lightning.simulate.data_parallel_files import Evaluations, Keeper
from dd_lightning.simulate.data_parallel_member import Member
from dd_lightning.simulate.data_parallel_ring import Ring
from dd_lightning.simulate.data_parallel_step import DataParallelStep, JobData
from dd_lightning.simulate.data_parallel_tape import JobTape
from dd_lightning.simulate.data_parallel_time import Course, JobLost, Step
from dd_lightning.simulate.random_state import RandomState
from dd_lightning.simulate.step_time import StepTimes
from dd_lightning.syncer.checkpoint import parameters_sha256
from dd_lightning.syncer.telemetry import package_versions, without_paths

log = logging.getLogger(__name__)

REFRESH_S = 1.0  # of virtual time: how often the view is looked after


class _Steps(Callback):
    """Tells the run of each step's end, and of the time to write a checkpoint: between two steps,
    when all of Lightning's counters stand at the same step."""

    def __init__(self, run: DataParallelRun) -> None:
        self._run = run

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run.begin(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._run.between_steps(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._run.after_batch(trainer)


class DataParallelRun:
    """Plays one run; the same arguments and outcome as `launch.run.LocalRun`.

    What a member's failure loses: `data_parallel_time`. An error in the module ends the run as
    failed; what was done since the last checkpoint is lost then.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        data: pl.LightningDataModule,
        view: View,
        draw: bool = True,
    ) -> None:
        self._settings, self._folder, self._data = settings, folder, data
        self._view, self._draw = view, draw
        self._values = settings.values
        self._interrupt, self._outcome = Interrupt(), Outcome()
        self._refreshed_s = 0.0
        self._made: Step | None = None  # the step under way
        self._module: pl.LightningModule | None = None
        self._tape: JobTape  # set when the run starts, as all below
        self._course: Course
        self._keeper: Keeper
        self._evaluations: Evaluations
        self.members: list[Member] = []

    def execute(self) -> Outcome:
        """Run to the end, whatever it is."""
        for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
            logging.getLogger(name).setLevel(logging.WARNING)
        write_configs(self._settings, self._folder)
        self._data.prepare_data()
        with self._interrupt, self._view:
            writer = TapeWriter(self._folder / TAPE)
            try:
                self._start(writer)
                self._play()
            except Exception as error:  # of the user's module: the run has failed, and says so
                log.exception("the job failed")
                self._outcome.status = "failed"
                self._problem(f"the job failed: {error!r}")
            if self._interrupt.requested:
                self._outcome.status = "interrupted"
            self._end()
            writer.close()
            status = self._outcome.status
            goes_on = not self._interrupt.requested
            self._outcome.validation_loss = finish_run(
                self._folder,
                status,
                draw=self._draw and goes_on,
                loggers=self._settings.loggers if goes_on else None,
            )
        return self._outcome

    # ------------------------------------------------------------------ parts

    def _start(self, writer: TapeWriter) -> None:
        values, settings = self._values, self._settings
        count = values["learners"]
        self._tape = JobTape(writer, count, values["trainer"]["accumulate_grad_batches"])
        self._tape.run(without_paths(values), values["seed"], package_versions())
        self._module = self._fresh_module()
        parameters = self._parameters()
        num_elements = sum(tensor.numel() for tensor in parameters.values())
        self._tape.layout(sorted(parameters), num_elements, _fingerprint(parameters))
        times = StepTimes.from_config(values["simulate"])
        network = settings.network
        if settings.faults.needs_proxy and not network.needs_proxy:
            network = unshaped(network)
        self._course = Course(
            DataParallel.of(values),
            [times.of(index, values["seed"]) for index in range(count)],
            Ring(network, values["seed"]),
            FaultTimes(settings.faults, values["trainer"]["max_steps"]),
            self._tape,
            num_elements,
            settings.syncer.timeouts.lease,
            values["simulate"]["restart_s"],
        )
        checkpoint = values["checkpoint"]
        self._keeper = Keeper(
            self._folder / "learners" / "0" / CHECKPOINTS, checkpoint["every_s"], checkpoint["keep"]
        )
        self._evaluations = Evaluations(values, self._folder)
        self.members = self._make_members(count)
        for line in settings.faults.describe():
            self._view.say(line)

    def _make_members(self, count: int) -> list[Member]:
        values, slots = self._values, self._settings.syncer.num_data_slots
        ours = RandomState.current()
        members = []
        for index in range(count):
            data = build_data(values, index, slots)
            pl.seed_everything(values["seed"] + index, workers=True)  # as the learner of its number
            members.append(Member(index, data, RandomState.current()))
        ours.restore()
        if not takes_slots(values) and count > 1:
            text = (
                "the datamodule takes no data_slot, so every member goes through all of the data, "
                "in an order of its own"
            )
            self._tape.warn(text, 0.0)
        return members

    def _fresh_module(self) -> pl.LightningModule:
        """As of the first learner, whose initial values are Θ at version 0 of our algorithms."""
        pl.seed_everything(self._values["seed"], workers=True)
        module = build_module(self._values)
        if not module.automatic_optimization:
            raise ValueError(
                "the module has automatic_optimization=False; allowed under "
                "algorithm=data_parallel: automatic optimization."
            )
        return module

    def _parameters(self) -> dict[str, Tensor]:
        """What is trained, by name."""
        assert self._module is not None  # made before anything asks
        return {
            canonical_name(name): parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }

    # ------------------------------------------------------------------ course

    def _play(self) -> None:
        checkpoint: Path | None = None
        while True:
            try:
                self._fit(checkpoint)
                return
            except JobLost:
                self._tape.rewound(self._course.now, self._course.saved)
                checkpoint = self._keeper.newest
                self._keeper.begin_again(self._course.now)
                self._module = self._fresh_module()

    def _fit(self, checkpoint: Path | None) -> None:
        values = self._values
        strategy = DataParallelStep(self.members, self._next_step, _device(values["trainer"]))
        csv = (values["logger"] or {}).get("csv")
        logger = pl.loggers.CSVLogger(str(self._keeper.folder.parent), name="csv", **csv) \
            if csv is not None else False  # fmt: skip
        trainer = pl.Trainer(
            **values["trainer"],
            devices=1,
            strategy=strategy,
            logger=logger,
            enable_checkpointing=False,
            callbacks=[_Steps(self)],
            default_root_dir=str(self._keeper.folder.parent),
        )
        path = None if checkpoint is None else str(checkpoint)
        data = JobData(self.members)
        trainer.fit(self._module, datamodule=data, ckpt_path=path, weights_only=True)
        self._save(trainer)

    def begin(self, trainer: pl.Trainer) -> None:
        """A `Trainer.fit` has set everything up."""
        data: Any = trainer.datamodule
        if restored := data.begin():
            self.members[0].random.restore()  # what is drawn outside of a step is its own
        else:
            self.members[0].random = RandomState.current()
        self._course.begin("checkpoint" if restored else "cold")

    def _next_step(self) -> tuple[int, ...]:
        self._made = self._course.next_step()
        return self._made.members

    def after_batch(self, trainer: pl.Trainer) -> None:
        """A micro-batch is done; the step too, if it was its last."""
        step = self._made
        if step is None or trainer.global_step != step.number:
            return
        self._made = None
        present = [self.members[index] for index in step.members]
        self._tape.stepped(
            step,
            {member.index: member.tokens for member in present},
            {member.index: member.mean_loss for member in present},
        )
        self._evaluations.poll(step.ended_s)
        budget = self._values["budget"]["tokens"]
        if self._interrupt.requested or (budget is not None and self._tape.tokens >= budget):
            trainer.should_stop = True
        if step.ended_s >= self._refreshed_s + REFRESH_S:
            self._refreshed_s = step.ended_s
            self._view.refresh()

    def between_steps(self, trainer: pl.Trainer) -> None:
        """Write a checkpoint if it is time."""
        if self._made is None and self._keeper.is_due(self._course.now):
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        course = self._course
        file = self._keeper.save(trainer, course.step, course.now)
        if file is None:  # this step has one already
            return
        self._tape.checkpoint(course.now, course.step, file.name)
        self._evaluations.saw(file.name, self._theta(), initial=course.step == 0)
        if course.step:
            course.checkpointed()

    def _theta(self) -> dict[str, Tensor]:
        """Copies of all that a checkpoint holds of the model."""
        assert self._module is not None  # a fit is under way
        state = self._module.state_dict()
        return {canonical_name(name): tensor.detach().clone() for name, tensor in state.items()}

    # ------------------------------------------------------------------ end

    def _end(self) -> None:
        """The rest of the tape."""
        if not hasattr(self, "_course"):
            return
        course, finished = self._course, self._outcome.status == "finished"
        self._evaluations.close(final=finished)
        digest = parameters_sha256(self._parameters()) if finished else None
        faults = course.faults.rows(course.now)
        self._tape.end(course.now, digest, self._outcome.status, faults)
        for text in course.faults.unfired() if finished else ():
            name = self._settings.faults.name
            self._problem(f"chaos {name}: a planned fault did not fire: {text}")

    def _problem(self, text: str) -> None:
        self._outcome.problems.append(text)
        self._view.say(text)


def _fingerprint(parameters: Mapping[str, Tensor]) -> str:
    shapes = [(name, tuple(parameters[name].shape)) for name in sorted(parameters)]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()


def _device(trainer: Mapping[str, Any]) -> str:
    wants_gpu = trainer.get("accelerator") in ("gpu", "cuda", "auto")
    return "cuda:0" if wants_gpu and torch.cuda.is_available() else "cpu"
