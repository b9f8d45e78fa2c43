"""Seconds from a link's return to the first contribution received, after outages of d seconds.

python scripts/bench_outage.py [--seconds 2 5 10 20] [--json] [network=us_eu ...]

Three learners, two of them cut off from the syncer at the same time, again and again in one run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dd_lightning.protocol.tape import read_tape

FIRST_S, REST_S = 40.0, 10.0  # of run before the first outage; between two
STEP_S = 0.05  # to which experiment=smoke pads its steps
BOUND_S = 2.0  # beyond a round trip
CUT = ("0", "1")


def arguments_of(seconds: list[float], overrides: list[str], folder: Path) -> list[str]:
    """Of `dd-lightning launch`."""
    faults, at_s = [], FIRST_S
    for lasts in seconds:
        faults += [f"{{kind: partition, target: {t}, at_s: {at_s}, seconds: {lasts}}}" for t in CUT]
        at_s += lasts + REST_S
    steps = round((at_s + REST_S) / STEP_S)
    return [
        "experiment=smoke", "learners=3", "network=us_eu", "evaluate.every_s=1000", "chaos=plan",
        f"chaos.faults=[{', '.join(faults)}]", f"trainer.max_steps={steps}",
        f"hydra.run.dir={folder}", *overrides,
    ]  # fmt: skip


def figures(folder: Path) -> list[dict[str, Any]]:
    """Per outage and learner: when the first contribution came after the link's return."""
    events = list(read_tape(folder / "tape.jsonl"))
    rows = []
    for fault in (event for event in events if event["event"] == "fault"):
        learner, back_s = fault["target"], fault["fired"] + fault["options"]["seconds"]
        mine = [event for event in events if event.get("learner") == learner]
        came = [e["t_s"] for e in mine if e["event"] == "contribution" and e["t_s"] >= back_s]
        joined = [e for e in mine if e["event"] == "join" and e["t_s"] >= fault["fired"]]
        rtt = [e["rtt_ms_p50"] for e in mine if e["event"] == "learner_stats" and e["rtt_ms_p50"]]
        if not came:
            raise SystemExit(f"bench_outage: learner {learner} never contributed after {back_s} s")
        rows.append(
            {"outage_s": fault["options"]["seconds"], "learner": learner}
            | {"after_s": round(min(came) - back_s, 3), "rtt_s": round(rtt[-1] / 1e3, 3)}
            | {"joined_after_s": round(joined[0]["t_s"] - back_s, 3) if joined else None}
        )
    return sorted(rows, key=lambda row: (row["outage_s"], row["learner"]))


def main() -> int:
    """Run and print; 1 where a contribution came later than the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--json", action="store_true", help="one JSON list")
    parser.add_argument("overrides", nargs="*", help="Hydra's, as network=three_continents")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = arguments_of(options.seconds, options.overrides, Path(scratch) / "run")
        command = [sys.executable, "-m", "dd_lightning.launch.app", *run]
        subprocess.run(command, check=True, stdout=sys.stderr)
        rows = figures(Path(scratch) / "run")
    for row in [] if options.json else rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0 if all(row["after_s"] <= BOUND_S + row["rtt_s"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
