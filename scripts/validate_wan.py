"""Measures what the shaping proxy does to request-acknowledge times: model and measured.

python scripts/validate_wan.py three_continents [bandwidth_scale=0.1 syncer_region=eu_west ...]
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dd_lightning.network import WanProfile
from dd_lightning.network.probe import AckServer, expected_request_s, request_times

SIZES = (10_000, 100_000, 1_000_000, 8_000_000)
REPEATS = 5
MAX_REQUEST_S = 10.0  # sizes that the profile makes slower than this are left out
STOP_TIMEOUT_S = 5.0


def load(name: str, overrides: list[str]) -> dict[str, Any]:
    """The resolved `conf/network/<name>.yaml`."""
    folder = Path(__file__).resolve().parents[1] / "conf" / "network"
    with initialize_config_dir(str(folder), version_base=None):
        config = OmegaConf.to_container(compose(name, overrides), resolve=True)
    assert isinstance(config, dict)
    return config


def validate(config: dict[str, Any]) -> None:
    """Print the table of what is applied, then model against measured."""
    profile = WanProfile.from_config(config)
    if not profile.needs_proxy:
        raise ValueError(f"network {profile.name} shapes nothing; there is nothing to measure")
    for row in profile.table():
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    regions = list(dict.fromkeys(profile.learner_regions))
    with AckServer() as server, tempfile.TemporaryDirectory() as folder:
        routes = [
            {"learner": region, "region": region, "listen_host": f"127.0.1.{index + 1}"}
            | {"ports": [server.port], "target_host": server.host}
            for index, region in enumerate(regions)
        ]
        file = Path(folder) / "proxy.json"
        file.write_text(json.dumps({"profile": config, "routes": routes, "seed": 0}))
        command = (sys.executable, "-m", "dd_lightning.network.proxy", "--config", str(file))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
            assert proxy.stdout is not None
            try:
                if not proxy.stdout.readline():
                    raise ValueError("the proxy did not start; its own message is above")
                print(f"{'region':16}{'bytes':>10}{'model s':>10}{'measured s':>12}{'worst s':>10}")
                for route in routes:
                    measure(profile, route["region"], (route["listen_host"], server.port))
            finally:
                proxy.terminate()
                proxy.wait(STOP_TIMEOUT_S)


def measure(profile: WanProfile, region: str, address: tuple[str, int]) -> None:
    """Print the rows of one region."""
    sizes = [n for n in SIZES if expected_request_s(profile, region, n) < MAX_REQUEST_S] or [1000]
    warm_up = max(sizes)
    for size, times in request_times(address, sizes, REPEATS, warm_up).items():
        model = expected_request_s(profile, region, size, warm_up)
        median = statistics.median(times)
        print(f"{region:16}{size:10}{model:10.3f}{median:12.3f}{max(times):10.3f}")


if __name__ == "__main__":
    try:
        validate(load(sys.argv[1] if len(sys.argv) > 1 else "three_continents", sys.argv[2:]))
    except ValueError as error:
        raise SystemExit(f"validate_wan: {error}") from None
