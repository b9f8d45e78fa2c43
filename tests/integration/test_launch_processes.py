"""Children: scrubbed environment, log files, ended by stage, killed with what they started."""

import os
import sys
import time

import psutil
import pytest

from dd_lightning.launch.processes import SCRUBBED, Child, end_all, scrubbed_environment

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WAIT = "print('ready', flush=True); import time; time.sleep(600)"


@pytest.fixture
def start(tmp_path):
    children = []

    def start_one(code, name="child", **options):
        log = tmp_path / f"{name}.log"
        command = [sys.executable, "-c", code]
        children.append(Child(name, command, log, scrubbed_environment(1), **options))
        return children[-1]

    yield start_one
    for child in children:
        child.kill()


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_environment_is_scrubbed_and_threads_are_limited(monkeypatch):
    for name in SCRUBBED:
        monkeypatch.setenv(name, "7")
    found = scrubbed_environment(2, {"DD_LEARNER": "0"})
    assert not (set(SCRUBBED) - {"DD_LEARNER"}) & found.keys()
    assert found["DD_LEARNER"] == "0" and found["OMP_NUM_THREADS"] == "2"
    assert found["PATH"] == os.environ["PATH"]


def test_exit_code_log_and_description(start):
    child = start("import sys; print('the reason'); sys.exit(3)")
    assert child.wait(TIMEOUT_S) == 3
    assert child.tail() == "the reason"
    assert child.description() == "child ended with exit code 3"


def test_the_tail_is_the_last_lines(start):
    child = start("[print(i) for i in range(100)]")
    assert child.wait(TIMEOUT_S) == 0
    assert child.tail(lines=2) == "98\n99"


def test_stages_end_in_order(start, tmp_path):
    note = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        f"    open({str(tmp_path / 'order')!r}, 'a').write(NAME)\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
    )
    first = start(f"NAME = '1'\n{note}{WAIT}", "first")
    second = start(f"NAME = '2'\n{note}{WAIT}", "second")
    until(lambda: "ready" in first.tail() and "ready" in second.tail())
    assert end_all([[second], [first]], TIMEOUT_S, 2 * TIMEOUT_S) == []
    assert (tmp_path / "order").read_text() == "21"


def test_who_ignores_sigterm_is_killed_and_named(start):
    child = start(IGNORE_TERM + WAIT)
    until(lambda: "ready" in child.tail())
    assert end_all([[child]], 0.1, 0.2) == ["child"]
    assert child.exit_code() == -9


def test_grandchildren_end_too(start):
    spawn = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}]); "
    child = start(spawn + WAIT)
    until(lambda: child.tail().count("ready") == 2)
    (grandchild,) = psutil.Process(child.pid).children()
    end_all([[child]], TIMEOUT_S, TIMEOUT_S)
    until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_end_when_the_launcher_is_killed(start, tmp_path):
    launcher = start(
        "from pathlib import Path; import sys\n"
        "from dd_lightning.launch.processes import Child\n"
        f"log = Path({str(tmp_path / 'x.log')!r})\n"
        f"c = Child('x', [sys.executable, '-c', {WAIT!r}], log, {{}})\n"
        f"print('pid', c.pid, flush=True)\n{WAIT}",
        "launcher",
    )
    until(lambda: "ready" in launcher.tail())
    child = psutil.Process(int(launcher.tail().split()[1]))
    psutil.Process(launcher.pid).kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_closing_stdin_is_seen(start):
    child = start("import sys; sys.stdin.read(); print('end')", keep_stdin=True)
    child.close_stdin()
    assert child.wait(TIMEOUT_S) == 0 and child.tail() == "end"


def test_a_nice_child_gets_the_launcher_s_priority_back_with_every_thread(start):
    code = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
    child = start(code + WAIT, nice=7)
    until(lambda: "ready" in child.tail())
    threads = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def priorities():
        return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}

    assert len(threads) == 2 and priorities() == {own + 7}
    if child.renice():  # root, or a user whom RLIMIT_NICE lets
        assert priorities() == {own}
    else:
        assert os.geteuid() != 0 and priorities() == {own + 7}


def test_what_a_child_said_is_not_what_an_earlier_one_said(start):
    first = start("print('{\"ready\": 1}')")
    assert first.wait(TIMEOUT_S) == 0 and first.said("ready") == {"ready": 1}
    second = start("print('{\"other\": 2}')")
    assert second.wait(TIMEOUT_S) == 0
    assert second.said("ready") is None and second.said("other") == {"other": 2}
