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
from dd_lightning.protocol.tape import TapeWriter

pytestmark = pytest.mark.integration

END_TIMEOUT_S = 90
WELL = "import time; time.sleep(0.3)"
UNTIL_ENDED = "print('ready', flush=True); import time; time.sleep(600)"
UNTIL_OTHERS_END = "import os, time\nwhile not os.path.exists({file!r}): time.sleep(0.02)"
UNTIL_STDIN_CLOSES = "import sys; sys.stdin.read()"
ROLES = ("syncer", "evaluator", "learner 0", "learner 1")
CRASH = "raise SystemExit('the reason')"
WRONG = "import sys; print('the setting'); sys.exit(2)"
LEAVE = "import sys; sys.exit(130)"
KILLED = "import os; os.kill(os.getpid(), 9)"
AGAIN = ("launcher.max_restarts=2", "launcher.restart_after_s=0.05")


class FakeRoles:
    """Starts `scripts[role]`; a role's n-th start takes the n-th script of a list.

    On the tape each start joins and gets to work, but for those of the roles in `idle`.
    """

    def __init__(self, scripts, folder, idle=()):
        self.scripts, self.folder, self.address = scripts, folder, "tcp://127.0.0.1:1"
        self.started, self.children, self.niced, self.idle = [], {}, [], idle

    def others_ended(self):
        """Whether all are started as often as they are to be, and learners that end have ended."""
        ending = [
            role
            for role, script in self.scripts.items()
            if role.startswith("learner") and script != UNTIL_ENDED
        ]
        return all(
            self.started.count(role) == len(self._starts(role)) for role in self.scripts
        ) and all(self.children[role].exit_code() is not None for role in ending)

    def _starts(self, role):
        script = self.scripts[role]
        return script if isinstance(script, list) else [script]

    def _tell(self, role, start):
        tape = TapeWriter(self.folder / "tape.jsonl")
        if role == "syncer":
            tape.write("syncer_start", 0.0, epoch=start, versions=[])
        if role == "syncer" and role not in self.idle:
            merge = dict.fromkeys(("quorum_s", "grace_s", "agreement", "digest"))
            merge |= {"epoch": start, "round": start, "fragment": 0, "version": [start, 1]}
            tape.write("merge", 0.0, contributors=[], **merge)
        if role.startswith("learner") and role not in self.idle:
            learner = {"learner": role.removeprefix("learner "), "generation": start}
            state = {"state_from": "cold", "state_step": 0, "data_position": 0}
            tape.write("join", 0.0, cause="join", continues=False, **learner, **state)
            tape.write("state", 0.0, state="training", **learner)
            tape.write("dead", 0.0, cause="connection closed", **learner)
        tape.close()

    def _start(self, role, keep_stdin=False, nice=0):
        script = self._starts(role)[self.started.count(role)]
        self.started.append(role)
        self.niced += [role] if nice else []
        command = [sys.executable, "-c", script]
        log = self.folder / f"{role}.log"
        child = Child(role, command, log, scrubbed_environment(1), keep_stdin, nice)
        self.children[role] = child
        return child

    def told(self, role, **options):
        child = self._start(role, **options)
        self._tell(role, self.started.count(role))
        return child

    def start_syncer(self, resume=False, nice=0):
        assert resume == ("syncer" in self.started)
        return self.told("syncer", nice=nice)

    def syncer_ready(self, syncer):
        pass

    def start_evaluator(self):
        return self._start("evaluator", keep_stdin=True)

    def start_proxy(self, again=False, nice=0):
        assert again == ("proxy" in self.started)
        return self._start("proxy", nice=nice)

    def proxy_ready(self, proxy):
        pass

    def start_learner(self, learner, nice=0):
        return self.told(f"learner {learner}", nice=nice)


class Data:
    def prepare_data(self):
        pass


class Said(list):
    """A view that keeps what was said; `tick` is called whenever it is refreshed."""

    def __init__(self, tick):
        super().__init__()
        self.tick = tick

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def say(self, text):
        self.append(text)

    def refresh(self):
        self.tick()


@pytest.fixture
def execute(monkeypatch, tmp_path):
    def run(scripts, *overrides, idle=()):
        with initialize_config_module("dd_lightning.conf", version_base="1.3"):
            config = compose("config", ["learners=2", *overrides])
        settings = check(OmegaConf.to_container(config, resolve=True))
        end = tmp_path / "others have ended"
        scripts = {
            "syncer": UNTIL_OTHERS_END.format(file=str(end)),
            "evaluator": UNTIL_STDIN_CLOSES,
            "learner 0": WELL,
            "learner 1": WELL,
        } | scripts
        roles = FakeRoles(scripts, tmp_path, idle)
        monkeypatch.setattr(module, "Roles", lambda *_: roles)
        monkeypatch.setattr(module, "finish_run", lambda *_, **__: None)
        said = Said(lambda: end.touch() if roles.others_ended() else None)
        before = psutil.Process().children(recursive=True)  # the fork server of other tests
        outcome = module.LocalRun(settings, tmp_path, Data(), said).execute()
        assert set(psutil.Process().children(recursive=True)) <= set(before)
        starts = {role: roles.started.count(role) for role in roles.started}
        assert all(roles.niced.count(role) == count - 1 for role, count in starts.items())
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
    outcome, _, started = execute({"learner 1": [CRASH, CRASH, WELL]}, *AGAIN)
    assert (outcome.status, outcome.problems) == ("finished", [])
    assert started.count("learner 1") == 3 and started.count("learner 0") == 1


@pytest.mark.parametrize("role", ["syncer", "proxy"])
def test_a_killed_syncer_or_proxy_is_started_again_while_learners_go_on(execute, tmp_path, role):
    others_end = UNTIL_OTHERS_END.format(file=str(tmp_path / "others have ended"))
    ready = "print('{\"ready\": true}', flush=True); " + UNTIL_ENDED
    lives = {"syncer": [KILLED, others_end], "proxy": [KILLED, ready]}
    network = ("network=us",) if role == "proxy" else ()
    outcome, said, started = execute({role: lives[role]}, *AGAIN, *network)
    assert (outcome.status, outcome.problems) == ("finished", [])
    assert started.count(role) == 2 and started.count("learner 0") == 1
    assert f"{role} was ended by SIGKILL; it is started again" in said


def test_a_process_that_died_and_is_not_at_work_again_fails_the_run(execute):
    outcome, _, _ = execute({"learner 1": [CRASH, WELL]}, *AGAIN, idle=("learner 1",))
    assert outcome.status == "failed"
    (problem,) = outcome.problems
    assert problem == "learner 1 died, and its next life had not joined when the run ended"


def test_a_wrong_setting_of_a_process_is_not_started_again(execute):
    outcome, _, started = execute({"learner 1": WRONG}, *AGAIN)
    assert started.count("learner 1") == 1
    (problem,) = outcome.problems
    assert "exit code 2" in problem and "a wrong setting" in problem and "the setting" in problem


def test_who_leaves_in_order_is_not_started_again_and_no_problem(execute):
    outcome, said, started = execute({"learner 1": LEAVE}, *AGAIN)
    assert (outcome.status, outcome.problems) == ("finished", [])
    assert started.count("learner 1") == 1
    assert "learner 1 has left; the others go on" in said


def test_a_syncer_that_was_told_to_end_interrupts_the_run(execute):
    learners = {"learner 0": UNTIL_ENDED, "learner 1": UNTIL_ENDED}
    outcome, _, _ = execute({"syncer": LEAVE} | learners, *AGAIN)
    assert outcome.status == "interrupted" and "told to end" in outcome.problems[0]


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


@pytest.fixture
def interrupt(tmp_path):
    """Sends a signal to this process once all others are `ready`."""
    threads = []

    def ready(role):
        log = tmp_path / f"{role}.log"
        return log.exists() and "ready" in log.read_text()

    def send(number):
        deadline = time.monotonic() + END_TIMEOUT_S
        while not all(map(ready, ROLES)) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    def begin(number):
        threads.append(threading.Thread(target=send, args=(number,), daemon=True))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join(END_TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_everything(execute, interrupt, number):
    interrupt(number)
    outcome, _, _ = execute(dict.fromkeys(ROLES, UNTIL_ENDED))
    assert outcome.status == "interrupted"
    assert outcome.problems == []  # nobody had to be killed


def test_who_does_not_end_is_killed_within_five_seconds(execute, interrupt):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    interrupt(signal.SIGINT)
    outcome, _, _ = execute(dict.fromkeys(ROLES, stubborn + UNTIL_ENDED))
    assert outcome.status == "interrupted"
    assert "the syncer did not end within 3.5 s and was killed" in outcome.problems[-1]
