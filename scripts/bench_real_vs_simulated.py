"""Runs of real processes, each beside its simulation with the step times that it measured.

python scripts/bench_real_vs_simulated.py [--runs 3] [--json] [learners=3 network=us_eu ...]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OVERRIDES = ["experiment=smoke", "trainer.max_steps=500", "launcher.step_floor_s=0.06"]
OVERRIDES += ["launcher.step_log=true", "evaluate.every_s=10000", "logger=csv"]
MOST = 0.05
LIMIT_S = 900


def launch(folder: Path, overrides: list[str]) -> dict[str, float]:
    """One run; what of its summary is compared."""
    command = [sys.executable, "-m", "dd_lightning.cli", "launch", f"hydra.run.dir={folder}"]
    done = subprocess.run(
        [*command, *overrides], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(overrides)}: {done.stderr[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "rounds": summary["rounds"],
        "contributors": summary["contributors"]["mean"],
        "goodput": summary["goodput"],
    }


def pair(overrides: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """(real, simulated)"""
    with tempfile.TemporaryDirectory() as name:
        real = launch(Path(name) / "real", [*overrides, "mode=processes"])
        trace = f"simulate.trace={name}/real"
        simulated = launch(Path(name) / "simulated", [*overrides, "mode=simulate", trace])
    return real, simulated


def main() -> int:
    """Compare and print; 1 where a median differs by more than 5%."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="Hydra's, as learners=3")
    arguments = parser.parse_intermixed_args()
    overrides = [*OVERRIDES, *arguments.overrides]
    pairs = []
    for _ in range(arguments.runs):
        pairs.append(pair(overrides))
        print(json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    found = {
        name: statistics.median(simulated[name] / real[name] for real, simulated in pairs)
        for name in pairs[0][0]
    }
    worst = max(abs(ratio - 1) for ratio in found.values())
    load = os.getloadavg()[1]
    if arguments.json:
        print(json.dumps({"ratios": found, "worst": worst, "load": load, "pairs": pairs}))
    else:
        shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
        print(f"simulated / real, median of {len(pairs)}: {shown}; worst {worst:.1%} (at most "
              f"{MOST:.0%}); load {load:.1f}")  # fmt: skip
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
