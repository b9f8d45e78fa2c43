"""A learner's step rate against plain Lightning's: 200 ms round trip, ten steps a transfer.

python scripts/bench_overhead.py [--away stop|kill] [task.data.batch_size=24 ...]
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

from dd_lightning.launch.overhead import AWAY_S, Overhead, Pair, median_ratios

OVERRIDES = ["experiment=demo", "algorithm.fragments=4", "algorithm.sync_every=48"]
OVERRIDES += ["task.data.batch_size=16"]
LEAST_RATE, MOST_P99 = 0.97, 1.2


def measure(arguments: argparse.Namespace, cores: tuple[int, int]) -> dict[str, object]:
    """Alternate plain runs and learners."""
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [*OVERRIDES, *arguments.overrides])
    values = OmegaConf.to_container(config, resolve=True)
    with tempfile.TemporaryDirectory() as folder:
        overhead = Overhead(values, Path(folder), arguments.steps, cores)
        pairs = []
        for _ in range(arguments.pairs):
            plain = overhead.plain()
            learner = overhead.learner(plain.percentile(50), arguments.away)
            pairs.append(Pair(plain, learner))
            print(json.dumps(pairs[-1].ratios()), file=sys.stderr, flush=True)
    return {
        "away": arguments.away and {"kind": arguments.away, "seconds": AWAY_S},
        "ratios": median_ratios(pairs),
        "pairs": [pair.ratios() for pair in pairs],
        "steps": [[len(one.seconds) for one in (pair.plain, pair.learner)] for pair in pairs],
        "plain_step_s_p50": [pair.plain.percentile(50) for pair in pairs],
        "merges": overhead.merges,
        "fragment_bytes": overhead.fragment_bytes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }


def main() -> int:
    """Measure and print; 1 where the bounds are not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="that count in each run")
    parser.add_argument("--away", choices=["stop", "kill"], help="the syncer is away for 20 s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="Hydra's, as task.data.batch_size=24")
    arguments = parser.parse_intermixed_args()
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise SystemExit("bench_overhead: needs two cores, one for syncer and proxy")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = measure(arguments, (cores[0], cores[1]))
    ratios = found["ratios"]
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{found['machine']}; {arguments.pairs} pairs of {found['steps'][0]} steps")
        print(f"step rate {ratios['rate']:.4f} of plain Lightning's (at least {LEAST_RATE})")
        print(
            f"p50 of a step {ratios['p50']:.4f} times, p99 {ratios['p99']:.4f} (at most {MOST_P99})"
        )
    return 0 if ratios["rate"] >= LEAST_RATE and ratios["p99"] <= MOST_P99 else 1


if __name__ == "__main__":
    sys.exit(main())
