"""`dd-lightning goodput`: how much of a fleet's time is training, at a failure rate and a size."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dd_lightning.simulate.failure_sources import FailureTrace
from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.goodput import FleetRow, simulate_fleet
from dd_lightning.simulate.paper_table import (
    CHIPS,
    errors,
    other_results,
    paper_rows,
    paper_value,
)
from dd_lightning.simulate.recovery_time import ExponentiatedWeibull


def main(argv: list[str] | None = None) -> int:
    """Simulate and print; exit 0. Raises ValueError for a wrong setting."""
    arguments = _parser().parse_args(argv)
    parameters = _parameters(arguments)
    trace = FailureTrace.read(arguments.trace) if arguments.trace else None
    if arguments.table and trace:
        raise ValueError("--trace has no effect with --table paper; leave one of them out.")
    if arguments.table:
        rows = paper_rows(parameters, arguments.seed)
    else:
        rows = _rows(arguments, parameters, trace)
    if arguments.plot:
        _plot(rows, arguments.plot)
    if arguments.json:
        found: dict[str, Any] = {
            "rows": [asdict(row) for row in rows],
            "parameters": parameters.to_dict() | {"seed": arguments.seed},
        }
        if arguments.table:
            found |= other_results(parameters, arguments.seed)
        print(json.dumps(found))
    else:
        _show(rows, bool(arguments.table))
        if arguments.table:
            _show_others(other_results(parameters, arguments.seed))
    return 0


def _rows(
    arguments: argparse.Namespace, parameters: FleetParameters, trace: FailureTrace | None
) -> list[FleetRow]:
    rows = []
    for learners in _integers("--learners", arguments.learners):
        for elastic in (False, True) if learners == 1 else (True,):
            for chips in _integers("--chips", arguments.chips):
                rows.append(
                    simulate_fleet(learners, chips, elastic, parameters, arguments.seed, trace)
                )
    return rows


def _integers(name: str, text: str) -> list[int]:
    try:
        return [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; allowed: integers, as 1,4,16.") from None


def _parameters(arguments: argparse.Namespace) -> FleetParameters:
    return FleetParameters(
        mtbi_years=arguments.mtbi_years,
        slice_chips=arguments.slice_chips,
        downscale_s=arguments.downscale_s,
        upscale_s=arguments.upscale_s,
        upscale_batch_s=arguments.upscale_batch_s,
        recovery=ExponentiatedWeibull(
            arguments.recovery_s, arguments.recovery_a, arguments.recovery_c
        ),
        days=arguments.days,
    )


def _show(rows: list[FleetRow], with_paper: bool) -> None:
    chips = sorted({row.chips for row in rows})
    print(
        "goodput in % (uptime in %" + ("; the paper's goodput after |" if with_paper else "") + ")"
    )
    print("learners".ljust(24) + "".join(f"{count:>20,}" for count in chips))
    for key in dict.fromkeys((row.learners, row.elastic) for row in rows):
        name = str(key[0]) + ("" if key[0] > 1 else ", elastic" if key[1] else ", no elasticity")
        cells = {row.chips: row for row in rows if (row.learners, row.elastic) == key}
        print(name.ljust(24) + "".join(_cell(cells[count], with_paper) for count in chips))
    if with_paper:
        mean, largest = errors(rows)
        print(f"difference to the paper: mean {mean:.2f} points, largest {largest:.2f}")


def _cell(row: FleetRow, with_paper: bool) -> str:
    text = f"{row.goodput:.1f} ({row.uptime:.1f})"
    return (f"{text} | {paper_value(row)}" if with_paper else text).rjust(20)


def _show_others(found: dict[str, Any]) -> None:
    print("\nfour learners, and four 18% slower with 10% jitter: goodput in %")
    for name, value in found["heterogeneous"].items():
        if name != "paper":
            print(f"  {name:<20} {value:.1f} (paper: {found['heterogeneous']['paper'][name[:3]]})")
    print("\ntemporary chips from the middle of the run on: wall time without waiting for them")
    for extra, row in found["scavenging"].items():
        print(f"  +{100 * float(extra):.0f}%".ljust(22) + f"{row['decoupled']:.2f} (paper: "
              f"{row['paper']:.2f})")  # fmt: skip


def _plot(rows: list[FleetRow], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib; install it with `pip install 'dd-lightning[kit]'`."
        ) from None
    figure, axes = plt.subplots(figsize=(6, 4))
    for learners, elastic in dict.fromkeys((row.learners, row.elastic) for row in rows):
        own = [row for row in rows if (row.learners, row.elastic) == (learners, elastic)]
        name = f"{learners} learner" + ("s" if learners > 1 else "" if elastic else ", rigid")
        axes.plot([row.chips for row in own], [row.goodput for row in own], "o-", label=name)
    axes.set(xscale="log", xlabel="chips", ylabel="goodput, %", ylim=(0, 101))
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    print(f"figure: {path}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    default = FleetParameters()
    parser = argparse.ArgumentParser(prog="dd-lightning goodput", description=__doc__)
    add = parser.add_argument
    add("--table", choices=["paper"], help="the paper's table beside ours, all sizes")
    add("--learners", default="1,2,4,8,16", help="M, comma-separated; 1 gives both rows")
    add("--chips", default=",".join(map(str, CHIPS)), help="of the whole fleet, comma-separated")
    add("--mtbi-years", type=float, default=default.mtbi_years, help="between failures of a chip")
    add("--slice-chips", type=int, default=default.slice_chips, help="chips that fail together")
    add("--downscale-s", type=float, default=default.downscale_s, help="dead time of a failure")
    add("--upscale-s", type=float, default=default.upscale_s, help="dead time of a return")
    add("--upscale-batch-s", type=float, default=default.upscale_batch_s,
        help="returned slices wait so long for others")  # fmt: skip
    add("--recovery-s", type=float, default=default.recovery.mean_s,
        help="mean time until a failed slice is back")  # fmt: skip
    add("--recovery-a", type=float, default=default.recovery.a, help="exponent of its distribution")
    add("--recovery-c", type=float, default=default.recovery.c, help="shape of its distribution")
    add("--days", type=float, default=default.days, help="simulated")
    add("--trace", type=Path, help="CSV time,component,seconds_down instead of random failures")
    add("--seed", type=int, default=1)
    add("--plot", type=Path, help="write a figure to this file")
    add("--json", action="store_true")
    return parser
