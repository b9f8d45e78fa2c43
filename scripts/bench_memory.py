"""Resident memory of a real syncer process against `estimate`: before a model, and at its peak.

python scripts/bench_memory.py [--json] [learners=4 task.module.gpt.depth=16 ...]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from dd_lightning.launch.resident import Resident

OVERRIDES = ["experiment=smoke", "trainer.max_steps=24", "algorithm.sync_every=6"]
OVERRIDES += ["task.module.gpt.width=512", "task.module.gpt.depth=4", "task.data.batch_size=1"]
OVERRIDES += ["task.data.sequence_length=16", "launcher.step_floor_s=0.3"]
OVERRIDES += ["evaluate.every_s=10000", "checkpoint.every_s=3", "logger=csv"]
TOLERANCE = 0.15
LIMIT_S = 900


def run(overrides: list[str]) -> tuple[int, int]:
    """(bytes before the model, peak bytes) of the syncer of one launched run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dd_lightning.cli", "launch", *overrides]
        command.append(f"hydra.run.dir={folder}/run")
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            resident = Resident(Path(folder) / "run", process.pid)
            try:
                resident.watch(lambda: process.poll() is not None, LIMIT_S)
            finally:
                process.terminate()
                process.wait(60)
        if process.returncode:
            raise SystemExit((Path(folder) / "log").read_text()[-3000:])
    return resident.empty, resident.peak


def main() -> int:
    """Measure and compare; 1 where the estimate is off by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="Hydra's, as learners=4")
    arguments = parser.parse_intermixed_args()
    overrides = [*OVERRIDES, *arguments.overrides]
    asked = [sys.executable, "-m", "dd_lightning.cli", "estimate", "--json", *overrides]
    estimated = json.loads(subprocess.run(asked, check=True, capture_output=True).stdout)
    empty, peak = run(overrides)
    grown = estimated["syncer_memory"] - estimated["syncer_memory_empty"]
    found = {
        "parameters": estimated["parameters"],
        "empty": empty,
        "peak": peak,
        "estimated": estimated["syncer_memory"],
        "error": estimated["syncer_memory"] / peak - 1,
        "growth_error": grown / (peak - empty) - 1,
    }
    if arguments.json:
        print(json.dumps(found))
    else:
        print(f"{found['parameters']:,} parameters: {empty / 1e6:.0f} MB without a model, "
              f"{peak / 1e6:.0f} MB at the peak, estimated {found['estimated'] / 1e6:.0f} MB "
              f"({found['error']:+.1%}); growth alone {found['growth_error']:+.1%}")  # fmt: skip
    return 0 if max(abs(found["error"]), abs(found["growth_error"])) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
