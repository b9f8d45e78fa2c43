"""`make dashboard`: what it says without runs, and that Ctrl-C ends all of Aim.

The second is slow: `aim up` imports for some ten seconds before it serves.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from dd_lightning.report.loggers import check_loggers, close_logs, open_logs
from tests.fleet_tapes import fleet_tape

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "scripts" / "dashboard.py"


def test_without_a_repository_it_says_how_to_get_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--repo", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert f"{tmp_path} has no .aim" in done.stderr and "make demo" in done.stderr


@pytest.mark.slow
def test_it_serves_the_runs_and_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    settings = check_loggers({"aim": {"repo": str(tmp_path)}})
    (log,) = open_logs(settings, "run", tmp_path, {}, 0.0)
    for event in fleet_tape(2, 10):
        log.event(event)
    assert close_logs([log], 60.0) == []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "--repo", str(tmp_path), "--port", str(port)]
    dashboard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = [dashboard.stdout.readline() for _ in range(2)]
        assert said[1] == f"http://127.0.0.1:{port}\n"
        with urllib.request.urlopen(f"{said[1].strip()}/api/projects/activity") as answer:
            assert b'"num_runs":1' in answer.read()
        family = psutil.Process(dashboard.pid).children(recursive=True)
        assert len(family) >= 2  # aim up, and its server
        dashboard.send_signal(signal.SIGINT)
        assert dashboard.wait(30.0) == 0
    finally:
        dashboard.kill()
        dashboard.communicate()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    assert alive == []
