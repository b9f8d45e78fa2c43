"""A donor's steps while its inner state is copied and sent, against its other steps.

python scripts/bench_donor.py [--steps 1500] [task.data.batch_size=24 ...]
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch.donating import Donating

OVERRIDES = ["experiment=demo", "network=none", "task.data.batch_size=16"]
MOST_P99 = 1.2


def main() -> int:
    """Measure and print; 1 where the bound is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="Hydra's, as task.data.batch_size=24")
    arguments = parser.parse_intermixed_args()
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise SystemExit("bench_donor: needs two cores, one for syncer and receiver")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [*OVERRIDES, *arguments.overrides])
    values = OmegaConf.to_container(config, resolve=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Donating(values, Path(folder), arguments.steps, (cores[0], cores[1])).measure()
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        within, outside = found["steps"]
        print(f"{found['machine']}; {found['transfers']} transfers of {found['bytes']} bytes, "
              f"{within} steps with one under way, {outside} without")  # fmt: skip
        print(f"p50 of a step {found['p50']:.4f} times, p99 {found['p99']:.4f} "
              f"(at most {MOST_P99})")  # fmt: skip
    return 0 if found["p99"] <= MOST_P99 else 1


if __name__ == "__main__":
    sys.exit(main())
