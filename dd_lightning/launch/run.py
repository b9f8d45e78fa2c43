"""One run from start to end: start the processes, watch them, end them, write what it was.

Losing a learner loses nothing but that learner: the others go on. Losing the syncer or the proxy
for good, or every learner, ends the run as failed; `supervision` says who is started again. Every
wait is bounded by `timeouts.*` or a constant here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch as pl

from dd_lightning.launch.chaos import RunChaos
from dd_lightning.launch.family import EVALUATOR, PROXY, Ended, Family
from dd_lightning.launch.finish import finish_run
from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.processes import end_all
from dd_lightning.launch.rejoins import SYNCER, learner_role
from dd_lightning.launch.resume import put_aside
from dd_lightning.launch.roles import ChildFailed, Roles, write_configs
from dd_lightning.launch.settings import Settings
from dd_lightning.launch.supervision import DONE, GIVE_UP, LEFT, RESTART, Supervisor
from dd_lightning.launch.view import View
from dd_lightning.report.read import TAPE

WATCH_S = 0.1
LAST_EVALUATION_S = 300.0  # for the evaluator's last pass over Θ, once everyone else has ended
END_STAGE_S = 0.5  # learners get so long to say goodbye before the syncer is told to end
KILL_MARGIN_S = 0.5  # beyond timeouts.shutdown; with it an interrupted run ends within 5 s


@dataclass(slots=True)
class Outcome:
    """How a run ended: `status` as in summary.json, `problems` in words, the objective."""

    status: str = "finished"
    problems: list[str] = field(default_factory=list)
    validation_loss: float | None = None


class LocalRun:
    """Starts, watches and ends the processes of one run.

    Args:
        folder: the run folder; it holds a run exactly where `launcher.resume` is given.
        data: a datamodule of the task, whose `prepare_data` is called once before all else.
        view: what is shown meanwhile.
    """

    def __init__(
        self, settings: Settings, folder: Path, data: pl.LightningDataModule, view: View
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._data = data
        self._view = view
        self._interrupt = Interrupt()
        self._outcome = Outcome()
        self._failed: set[str] = set()  # learners given up
        self._ended = False  # the syncer has, in order
        self._alone_until: float | None = None  # the syncer's deadline once no learner is left
        self._draws = True
        self._prepare()

    # ------------------------------------------------------------------ replaced in virtual time

    def _prepare(self) -> None:
        """What starts, owns and disturbs the processes."""
        settings, folder, say = self._settings, self._folder, self._view.say
        self._roles = Roles(settings, folder, self._interrupt)
        supervisor = Supervisor(settings.max_restarts, settings.launcher["restart_after_s"])
        self._family = Family(self._roles, supervisor, folder / TAPE, say)
        self._chaos = RunChaos.of_children(settings.faults, folder, self._family.at_work, say)

    def _clock(self) -> float:
        return time.monotonic()

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    # ------------------------------------------------------------------ course

    def execute(self) -> Outcome:
        """Run to the end, whatever it is, and leave no process behind."""
        if self._settings.resume is None:
            write_configs(self._settings, self._folder)
        elif self._settings.cut is not None:
            put_aside(self._folder, self._settings.cut)
        self._data.prepare_data()  # nothing runs yet: Ctrl-C may end the launcher right here
        with self._interrupt as interrupt, self._view:
            try:
                self._start()
                self._watch()
                self._last_evaluation()
            except (ChildFailed, OSError) as error:  # OSError: the syncer's store did not answer
                self._fail(str(error))
            finally:
                self._chaos.release()
                self._end()
                if said := self._chaos.unmount():
                    self._fail(said)
            events, unfired = self._chaos.end(
                self._outcome.status == "finished" and not interrupt.requested
            )
            for text in unfired:
                self._fail(text)
            if interrupt.requested:
                self._outcome.status = "interrupted"
            self._outcome.validation_loss = finish_run(
                self._folder,
                self._outcome.status,
                draw=self._draws and not interrupt.requested,
                events=events,
                # an interrupted run ends within seconds: opening a dashboard again takes as many
                loggers=None if interrupt.requested else self._settings.loggers,
            )
        return self._outcome

    def _start(self) -> None:
        self._chaos.begin()
        syncer = self._family.start(SYNCER, resume=self._settings.resume is not None)
        self._family.start(EVALUATOR)  # reads version 0 while learners start
        self._roles.syncer_ready(syncer)
        self._view.say(f"syncer listens at {self._roles.address}")
        if self._settings.proxied and not self._interrupt.requested:
            self._roles.proxy_ready(self._family.start(PROXY))
        for learner in self._settings.learner_ids:
            if not self._interrupt.requested:
                self._family.start(learner_role(learner))

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        """Until the syncer has ended and, after it, the learners."""
        while not self._interrupt.requested and self._outcome.status == "finished":
            for ended in self._family.reap():
                self._take_end(ended)
            if self._ended:
                self._await_learners()
                return
            self._family.restart_due()
            self._family.follow()
            self._check_alone()
            self._chaos.poll()
            self._view.refresh()
            self._sleep(WATCH_S)

    def _take_end(self, ended: Ended) -> None:
        """What the end of a process means for the run.

        Raises:
            ChildFailed: the run cannot go on without it.
        """
        role, what = ended.role, ended.verdict.what
        if role == EVALUATOR:  # without it no validation loss, but the training itself goes on
            self._problem(str(ChildFailed(ended.child)))
        elif what == RESTART:
            return
        elif role == SYNCER and what == DONE:
            self._ended = True
        elif role == SYNCER and what == LEFT:
            self._outcome.status = "interrupted"
            self._problem("the syncer was told to end (SIGINT or SIGTERM), and the run with it")
        elif role in (SYNCER, PROXY):
            raise ChildFailed(ended.child, self._why(ended))
        elif what == GIVE_UP:
            self._failed.add(role)
            self._problem(str(ChildFailed(ended.child, self._why(ended))))
        elif what == LEFT:
            self._view.say(f"{role} has left; the others go on")

    def _why(self, ended: Ended) -> str:
        """How it ended, and why it is not started again where it might be."""
        said = ended.child.description()
        if self._settings.max_restarts == 0:
            return said
        return f"{said} and is not started again ({ended.verdict.why})"

    def _check_alone(self) -> None:
        """A syncer without any learner ends the run itself, in time.

        Raises:
            ChildFailed: it did not.
        """
        timeouts = self._settings.syncer.timeouts
        if any(self._family.learners()) or self._family.waiting or self._family.rejoins.members:
            self._alone_until = None
        elif self._failed >= {learner_role(one) for one in self._settings.learner_ids}:
            self._fail("every learner has failed")
        elif self._alone_until is None:
            patience_s = timeouts.rejoin + timeouts.lease + timeouts.reanchor + timeouts.flush
            self._alone_until = self._clock() + patience_s
        elif self._clock() > self._alone_until:
            syncer = self._family.children[SYNCER]  # else its restart were waited for
            raise ChildFailed(syncer, "the syncer did not end after the last learner")

    def _await_learners(self) -> None:
        """The syncer has released the learners; they end within `timeouts.flush`."""
        deadline = self._clock() + self._settings.syncer.timeouts.flush
        self._family.expect_no_more()
        while any(self._family.learners()) and not self._interrupt.requested:
            for ended in self._family.reap():
                self._take_end(ended)
            if self._clock() > deadline:
                name, child = next(self._family.learners())
                raise ChildFailed(child, f"learner {name} did not end after the syncer")
            self._sleep(WATCH_S)
        self._family.follow()
        for sentence in self._family.rejoins.missing():
            self._fail(sentence)

    def _last_evaluation(self) -> None:
        evaluator = self._family.children.get(EVALUATOR)
        if evaluator is None or self._outcome.status != "finished":
            return
        evaluator.close_stdin()
        deadline = time.monotonic() + LAST_EVALUATION_S
        while not self._interrupt.requested:
            if (code := evaluator.wait(WATCH_S)) is not None:
                if code != 0:
                    raise ChildFailed(evaluator)
                return
            if time.monotonic() > deadline:
                said = f"the evaluator did not end within {LAST_EVALUATION_S:g} s"
                raise ChildFailed(evaluator, said)

    def _end(self) -> None:
        """End whatever still runs: learners and evaluator, then the syncer with the proxy."""
        children = dict(self._family.children)
        last = [children.pop(role) for role in (SYNCER, PROXY) if role in children]
        timeout_s = self._settings.syncer.timeouts.shutdown + KILL_MARGIN_S
        killed = end_all([[*children.values()], last], END_STAGE_S, timeout_s)
        if SYNCER in killed:
            self._problem(
                f"the syncer did not end within {timeout_s:g} s and was killed: what was merged "
                "after its last checkpoint is lost"
            )

    def _problem(self, text: str) -> None:
        self._outcome.problems.append(text)
        self._view.say(text)

    def _fail(self, text: str) -> None:
        self._outcome.status = "failed"
        self._problem(text)
