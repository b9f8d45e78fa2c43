"""One run from start to end: start the processes, watch them, end them, write what it was.

Losing a learner loses nothing but that learner: the others go on. Losing the syncer, the proxy or
every learner ends the run as failed. Every wait is bounded by `timeouts.*` or a constant here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import lightning.pytorch as pl

from dd_lightning.launch.finish import finish_run
from dd_lightning.launch.interrupt import Interrupt
from dd_lightning.launch.processes import Child, end_all
from dd_lightning.launch.roles import ChildFailed, Roles, write_configs
from dd_lightning.launch.settings import Settings
from dd_lightning.launch.view import View

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
        folder: the run folder; it must not hold a run yet.
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
        self._roles = Roles(settings, folder, self._interrupt)
        self._outcome = Outcome()
        self._learners: dict[str, Child] = {}  # those running
        self._failed: set[str] = set()
        self._restarts = dict.fromkeys(settings.learner_ids, 0)
        self._restart_at: dict[str, float] = {}
        self._syncer: Child | None = None
        self._proxy: Child | None = None
        self._evaluator: Child | None = None

    def execute(self) -> Outcome:
        """Run to the end, whatever it is, and leave no process behind."""
        write_configs(self._settings, self._folder)
        self._data.prepare_data()  # nothing runs yet: Ctrl-C may end the launcher right here
        with self._interrupt as interrupt, self._view:
            try:
                self._start()
                self._watch()
                self._last_evaluation()
            except (ChildFailed, OSError) as error:  # OSError: the syncer's store did not answer
                self._fail(str(error))
            finally:
                self._end()
            if interrupt.requested:
                self._outcome.status = "interrupted"
            self._outcome.validation_loss = finish_run(
                self._folder, self._outcome.status, draw=not interrupt.requested
            )
        return self._outcome

    def _start(self) -> None:
        self._syncer = self._roles.start_syncer()
        self._evaluator = self._roles.start_evaluator()  # reads version 0 while learners start
        self._roles.syncer_ready(self._syncer)
        self._view.say(f"syncer listens at {self._roles.address}")
        if self._settings.network.needs_proxy and not self._interrupt.requested:
            self._proxy = self._roles.start_proxy()
        for learner in self._settings.learner_ids:
            if not self._interrupt.requested:
                self._learners[learner] = self._roles.start_learner(learner)

    def _watch(self) -> None:
        """Until the syncer has ended and, after it, the learners."""
        timeouts = self._settings.syncer.timeouts
        alone_until: float | None = None  # the syncer's deadline once no learner is left
        while not self._interrupt.requested:
            self._reap_learners()
            self._check_evaluator()
            if self._proxy is not None and self._proxy.exit_code() is not None:
                raise ChildFailed(self._proxy)
            assert self._syncer is not None
            if (code := self._syncer.exit_code()) is not None:
                if code != 0:
                    raise ChildFailed(self._syncer)
                self._await_learners()
                return
            if self._learners or self._restart_at:
                alone_until = None
            elif alone_until is None:
                if self._failed == set(self._settings.learner_ids):
                    self._fail("every learner has failed")
                    return
                alone_until = time.monotonic() + timeouts.rejoin + timeouts.lease + timeouts.flush
            elif time.monotonic() > alone_until:
                raise ChildFailed(self._syncer, "the syncer did not end after the last learner")
            self._view.refresh()
            time.sleep(WATCH_S)

    def _await_learners(self) -> None:
        """The syncer has released the learners; they end within `timeouts.flush`."""
        deadline = time.monotonic() + self._settings.syncer.timeouts.flush
        self._restart_at.clear()
        while self._learners and not self._interrupt.requested:
            self._reap_learners()
            if time.monotonic() > deadline:
                name, child = next(iter(self._learners.items()))
                raise ChildFailed(child, f"learner {name} did not end after the syncer")
            time.sleep(WATCH_S)

    def _reap_learners(self) -> None:
        """Note learners that ended; start those again whose restart is due."""
        launcher = self._settings.launcher
        for learner, child in list(self._learners.items()):
            code = child.exit_code()
            if code is None:
                continue
            del self._learners[learner]
            child.kill()  # what it may have started itself
            if code == 0:
                continue
            if self._restarts[learner] < launcher["max_restarts"]:
                self._restarts[learner] += 1
                self._restart_at[learner] = time.monotonic() + launcher["restart_after_s"]
                self._view.say(f"{child.description()}; it is started again")
            else:
                self._failed.add(learner)
                self._problem(str(ChildFailed(child)))
        for learner, due in list(self._restart_at.items()):
            if time.monotonic() >= due:
                del self._restart_at[learner]
                self._learners[learner] = self._roles.start_learner(learner)

    def _check_evaluator(self) -> None:
        """Without it there is no validation loss, but the training itself goes on."""
        if self._evaluator is not None and self._evaluator.exit_code() is not None:
            self._problem(str(ChildFailed(self._evaluator)))
            self._evaluator.kill()
            self._evaluator = None

    def _last_evaluation(self) -> None:
        if self._evaluator is None or self._outcome.status != "finished":
            return
        self._evaluator.close_stdin()
        deadline = time.monotonic() + LAST_EVALUATION_S
        while not self._interrupt.requested:
            if (code := self._evaluator.wait(WATCH_S)) is not None:
                if code != 0:
                    raise ChildFailed(self._evaluator)
                return
            if time.monotonic() > deadline:
                said = f"the evaluator did not end within {LAST_EVALUATION_S:g} s"
                raise ChildFailed(self._evaluator, said)

    def _end(self) -> None:
        """End whatever still runs: learners and evaluator, then the syncer with the proxy."""
        first = [*self._learners.values(), *([self._evaluator] if self._evaluator else [])]
        last = [child for child in (self._syncer, self._proxy) if child is not None]
        timeout_s = self._settings.syncer.timeouts.shutdown + KILL_MARGIN_S
        killed = end_all([first, last], END_STAGE_S, timeout_s)
        if "syncer" in killed:
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
