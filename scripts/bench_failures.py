"""What failures cost: learners killed about three times each and the syncer twice, beside a run
without. Two runs one after the other, about five minutes each on two quiet cores.

python scripts/bench_failures.py [--json] [--keep FOLDER] [budget.tokens=4000000 ...]
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from dd_lightning.launch.failures import WARM_UP_STEPS, figures, launch, result


def print_table(found: dict) -> None:
    """Both runs side by side, then what was promised."""
    both = (found["undisturbed"], found["disturbed"])
    print(f"{'':<24}{'undisturbed':>16}{'disturbed':>16}")
    for name in both[0]:
        if isinstance(both[0][name], dict):
            continue
        cells = "".join(f"{one[name]:>16,.4f}" for one in both)
        print(f"{name:<24}{cells}")
    print(f"kills: {found['disturbed']['kills']}; joins: {found['disturbed']['joins']}")
    print(f"steps: all incarnations, without the first {WARM_UP_STEPS} of each")
    for check in found["checks"]:
        kept = "kept" if check["kept"] else "NOT KEPT"
        print(f"{check['what']:<24}{check['found']:>16.4f}  {check['allowed']}  {kept}")


def main() -> int:
    """Measure and print; 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep both run folders in this one")
    parser.add_argument("overrides", nargs="*", help="Hydra's, for both runs")
    arguments = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run ends too
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary).absolute()
        runs = {}
        for name, chaos in (("undisturbed", ["chaos=none"]), ("disturbed", [])):
            launch(folder / name, [*chaos, *arguments.overrides])
            runs[name] = figures(folder / name)
        found = result(runs["disturbed"], runs["undisturbed"])
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print_table(found)
    return 0 if found["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
