"""`python -m dd_lightning.network.proxy`: ready line, statistics, and an end."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dd_lightning.network.probe import AckServer, request_times

pytestmark = pytest.mark.integration

END_TIMEOUT_S = 60.0  # of a process that must import first, on a busy machine
REQUESTS = 20
PROFILE = {
    "name": "test",
    "regions": ["a", "b"],
    "syncer_region": "b",
    "links": {"a-b": {"rtt_ms": 20, "mbit_s": 100}},
}


def start(folder: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
    file = folder / "proxy.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "dd_lightning.network.proxy", "--config", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_serves_counts_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    stats = tmp_path / "stats.json"
    with AckServer() as server:
        routes = [
            {"learner": str(k), "listen_host": f"127.0.1.{k + 1}", "target_host": server.host}
            | {"ports": [server.port]}
            for k in range(2)
        ]
        config = {"profile": PROFILE, "routes": routes, "seed": 1, "stats_file": str(stats)}
        with start(tmp_path, config) as proxy:
            assert proxy.stdout is not None and proxy.stderr is not None
            try:
                assert json.loads(proxy.stdout.readline()) == {"ready": True}
                far = request_times(("127.0.1.1", server.port), [1000], REQUESTS)[1000]
                near = request_times(("127.0.1.2", server.port), [1000], REQUESTS)[1000]
                assert min(far) >= 0.02 > min(near)  # learner 1 sits in the syncer's region
                proxy.send_signal(number)
                assert proxy.wait(END_TIMEOUT_S) == 0, proxy.stderr.read()
            finally:
                proxy.kill()
    assert server.sources == ["127.0.1.1", "127.0.1.2"]
    counts = {"up": REQUESTS * 1008, "down": REQUESTS}
    assert json.loads(stats.read_text()) == {"learners": {"0": counts, "1": counts}}


def test_wrong_settings_are_one_line(tmp_path: Path) -> None:
    config = {"profile": {**PROFILE, "bandwidth_scale": 0}, "routes": []}
    with start(tmp_path, config) as proxy:
        out, err = proxy.communicate(timeout=END_TIMEOUT_S)
    assert proxy.returncode != 0 and out == ""
    assert err.startswith("proxy: network.bandwidth_scale=0") and err.count("\n") == 1
