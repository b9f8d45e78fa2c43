"""What the launcher does when its processes end as they should, crash, or are interrupted.

The processes are one-line scripts here; the real ones are in `test_launch_smoke.py`.
"""

import os
import signal
import sys
import threading
import time

import psutil
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch import run as module
from dd_lightning.launch.processes import Child, scrubbed_environment
from dd_lightning.launch.settings import check

pytestmark = pytest.mark.integration

WELL = "import time; time.sleep(0.3)"
UNTIL_ENDED = "import time; time.sleep(60)"
UNTIL_STDIN_CLOSES = "import sys; sys.stdin.read()"
CRASH = "raise SystemExit('the reason')"


class FakeRoles:
    """Starts `scripts[role]`; a learner's n-th start takes the n-th script of a list."""

    def __init__(self, scripts, folder):
        self.scripts, self.folder, self.address = scripts, folder, "tcp://127.0.0.1:1"
        self.started = []

    def _start(self, role, keep_stdin=False):
        script = self.scripts[role]
        if isinstance(script, list):
            script = script[self.started.count(role)]
        self.started.append(role)
        command = [sys.executable, "-c", script]
        log = self.folder / f"{role}.log"
        return Child(role, command, log, scrubbed_environment(1), keep_stdin)

    def start_syncer(self):
        return self._start("syncer")

    def syncer_ready(self, syncer):
        pass

    def start_evaluator(self):
        return self._start("evaluator", keep_stdin=True)

    def start_learner(self, learner):
        return self._start(f"learner {learner}")


class Data:
    def prepare_data(self):
        pass


class Said(list):
    """A view that keeps what was said."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def say(self, text):
        self.append(text)

    def refresh(self):
        pass


@pytest.fixture
def execute(monkeypatch, tmp_path):
    def run(scripts, *overrides):
        with initialize_config_module("dd_lightning.conf", version_base="1.3"):
            config = compose("config", ["learners=2", *overrides])
        settings = check(OmegaConf.to_container(config, resolve=True))
        scripts = {
            "syncer": "import time; time.sleep(0.8)",
            "evaluator": UNTIL_STDIN_CLOSES,
            "learner 0": WELL,
            "learner 1": WELL,
        } | scripts
        roles = FakeRoles(scripts, tmp_path)
        monkeypatch.setattr(module, "Roles", lambda *_: roles)
        said = Said()
        outcome = module.LocalRun(settings, tmp_path, Data(), said).execute()
        assert psutil.Process().children(recursive=True) == []
        return outcome, said, roles.started

    return run


def test_a_run_that_goes_well_is_finished_without_problems(execute, tmp_path):
    outcome, _, started = execute({})
    assert (outcome.status, outcome.problems) == ("finished", [])
    assert sorted(started) == ["evaluator", "learner 0", "learner 1", "syncer"]
    assert (tmp_path / "config.yaml").exists() and (tmp_path / "syncer.yaml").exists()


def test_a_crashed_learner_is_told_with_its_log_and_the_others_go_on(execute):
    outcome, said, _ = execute({"learner 1": CRASH})
    assert outcome.status == "finished"
    (problem,) = outcome.problems
    assert "learner 1 ended with exit code 1" in problem and "the reason" in problem
    assert problem in said


def test_a_crashed_learner_is_started_again_as_often_as_allowed(execute):
    overrides = ["launcher.max_restarts=2", "launcher.restart_after_s=0.05"]
    outcome, _, started = execute({"learner 1": [CRASH, CRASH, WELL]}, *overrides)
    assert (outcome.status, outcome.problems) == ("finished", [])
    assert started.count("learner 1") == 3 and started.count("learner 0") == 1


def test_a_run_without_any_learner_left_has_failed(execute):
    outcome, _, _ = execute(
        {"learner 0": CRASH, "learner 1": CRASH, "syncer": UNTIL_ENDED, "evaluator": UNTIL_ENDED}
    )
    assert outcome.status == "failed" and len(outcome.problems) == 3


@pytest.mark.parametrize("role", ["syncer", "evaluator"])
def test_a_crash_of_another_process_is_told_with_its_log(execute, role):
    learners = {"learner 0": UNTIL_ENDED, "learner 1": UNTIL_ENDED} if role == "syncer" else {}
    outcome, _, _ = execute({role: CRASH} | learners)
    assert outcome.status == ("failed" if role == "syncer" else "finished")
    (problem,) = outcome.problems
    assert f"{role} ended with exit code 1" in problem and "the reason" in problem


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_everything(execute, number):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    started = time.monotonic()
    forever = dict.fromkeys(["syncer", "evaluator", "learner 0", "learner 1"], UNTIL_ENDED)
    outcome, _, _ = execute(forever)
    assert outcome.status == "interrupted"
    assert time.monotonic() - started < 5.5
    timer.join()


def test_who_does_not_end_is_killed_within_five_seconds(execute, tmp_path):
    names = ["syncer", "evaluator", "learner 0", "learner 1"]
    interrupted = []

    def interrupt_when_ready():
        while not all((tmp_path / f"{name}.log").exists() for name in names) or not all(
            "ready" in (tmp_path / f"{name}.log").read_text() for name in names
        ):
            time.sleep(0.02)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_ready, daemon=True)
    thread.start()
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); "
    outcome, _, _ = execute(dict.fromkeys(names, stubborn + UNTIL_ENDED))
    assert time.monotonic() - interrupted[0] < 5.0
    assert outcome.status == "interrupted"
    assert "the syncer did not end within 3.5 s and was killed" in outcome.problems[-1]
    thread.join()
