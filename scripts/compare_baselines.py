"""Runs beside plain Lightning: one learner with as many steps, and with M times the batch.

python scripts/compare_baselines.py RUN [RUN ...]    (run folders of experiment=demo, by seed)
"""

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from dd_lightning.launch.baseline import train_alone
from dd_lightning.report.comparison import compare_bytes, format_bytes

KINDS = ("decoupled", "single learner", "M times the batch")
ENOUGH_SPREADS = 2.0  # by which the runs' mean must be below the single learner's


def measure(folder: Path) -> dict[str, Any]:
    """Loss by kind and the bytes of one run; the baselines are trained here, with its seed."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    single = train_alone(values)
    large = train_alone(values, values["learners"])
    losses = (summary["loss"]["validation"], single.loss, large.loss)
    row = {"run": str(folder), "seed": values["seed"]}
    row |= {"loss": dict(zip(KINDS, losses, strict=True))}
    row |= {"bytes": compare_bytes(summary, single.parameters)}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread (max - min) of each kind, and by how many spreads the runs are below."""
    table = {}
    for kind in KINDS:
        losses = [run["loss"][kind] for run in runs]
        table[kind] = {"mean": statistics.mean(losses), "spread": max(losses) - min(losses)}
    ours, single = table[KINDS[0]], table[KINDS[1]]
    spread = max(ours["spread"], single["spread"])
    below = single["mean"] - ours["mean"]
    return {"loss": table, "below": below, "spreads": below / spread if spread else None}


def main() -> int:
    """Measure and print; 1 where the runs are not clearly below the single learner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a finished run's folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    runs = [measure(folder) for folder in arguments.runs]
    found = judge(runs)
    spreads = found["spreads"]
    if arguments.json:
        print(json.dumps({"runs": runs, **found}, indent=1))
    else:
        for kind, row in found["loss"].items():
            print(f"{kind:18} {row['mean']:.4f}  spread {row['spread']:.4f} of {len(runs)} seeds")
        said = "one seed, so no spread" if spreads is None else f"{spreads:.1f} spreads"
        print(f"below the single learner by {found['below']:.4f} = {said}")
        sent, other = (runs[0]["bytes"][key] for key in ("sent", "data_parallel"))
        print(f"sent {format_bytes(sent)}; data-parallel would have {format_bytes(other)}")
    return 0 if spreads is not None and spreads > ENOUGH_SPREADS else 1


if __name__ == "__main__":
    sys.exit(main())
