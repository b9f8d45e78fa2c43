"""`dd-lightning goodput`: how much of a fleet's time is training, at a failure rate and a size.

Nothing is trained: failures, returns and rounds of up to millions of chips are simulated. Without
arguments it shows every size of the paper's table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dd_lightning.commands.goodput_tables import check_plot, plot, show, show_others, show_rounds
from dd_lightning.commands.parsing import OneLineParser, integers
from dd_lightning.simulate.failure_sources import FailureTrace
from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.goodput import Fleet, simulate_fleet, simulate_fleet_in_rounds
from dd_lightning.simulate.paper_table import CHIPS, other_results, paper_rows
from dd_lightning.simulate.recovery_time import ExponentiatedWeibull
from dd_lightning.simulate.scavenging import data_parallel_slowdown, read_capacity, wall_time
from dd_lightning.simulate.waiting import RoundRules

LEARNERS = (1, 2, 4, 8, 16)
NOT_WITH_TABLE = ("trace", "learners", "chips", "quorum", "wait", "grace_s", "round_s", "speeds")
ROUND_FLAGS = ("quorum", "grace_s", "round_s", "speeds")
REPLACED_BY_TRACE = ("mtbi_years", "recovery_s", "recovery_a", "recovery_c")


def main(argv: list[str] | None = None) -> int:
    """Simulate and print; exit 0. Raises ValueError for a wrong setting."""
    arguments = _parser().parse_args(argv)
    if arguments.seed < 0:
        raise ValueError(f"--seed is {arguments.seed}; allowed: an integer >= 0.")
    parameters = _parameters(arguments)
    scavenged = _scavenged(arguments.scavenge) if arguments.scavenge else {}
    if arguments.plot:
        check_plot(arguments.plot)
    if arguments.table:
        _refuse_beside_table(arguments)
        fleets = [Fleet(row) for row in paper_rows(parameters, arguments.seed)]
        found: dict[str, Any] = other_results(parameters, arguments.seed)
    else:
        fleets, found = _fleets(arguments, parameters), {}
    for sentence in _without_effect(arguments):
        print(f"warning: {sentence}", file=sys.stderr)
    rows = [fleet.row for fleet in fleets]
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        played = [_played(fleet) for fleet in fleets if fleet.rounds is not None]
        shown = {
            "rows": [asdict(row) for row in rows],
            "parameters": parameters.to_dict() | {"seed": arguments.seed},
        }
        if scavenged:
            found["scavenged"] = scavenged
        print(json.dumps(shown | found | ({"rounds": played} if played else {})))
        return 0
    show(rows, bool(arguments.table))
    show_rounds(fleets)
    if arguments.table:
        show_others(found)
    if scavenged:
        print(
            f"wall time with temporary chips: decoupled {scavenged['decoupled']:.3f}, "
            f"data-parallel {scavenged['data_parallel']:.3f} of that without"
        )
    return 0


def _scavenged(text: str) -> dict[str, float]:
    capacity = read_capacity(text)
    return {
        "decoupled": wall_time(capacity),
        "data_parallel": wall_time(capacity, data_parallel_slowdown),
    }


def _refuse_beside_table(arguments: argparse.Namespace) -> None:
    given = [name for name in NOT_WITH_TABLE if getattr(arguments, name) is not None]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags}: no effect with --table paper; leave one of them out.")


def _fleets(arguments: argparse.Namespace, parameters: FleetParameters) -> list[Fleet]:
    trace = FailureTrace.read(arguments.trace) if arguments.trace else None
    rules = _rules(arguments)
    fleets = []
    for learners in integers("--learners", arguments.learners or ",".join(map(str, LEARNERS))):
        for elastic in (False, True) if learners == 1 else (True,):
            for chips in integers("--chips", arguments.chips or ",".join(map(str, CHIPS))):
                size = (learners, chips, elastic, parameters)
                if rules is None:
                    fleets.append(Fleet(simulate_fleet(*size, arguments.seed, trace)))
                else:
                    fleets.append(simulate_fleet_in_rounds(*size, rules, arguments.seed, trace))
    return fleets


def _without_effect(arguments: argparse.Namespace) -> Iterator[str]:
    """What was given for nothing, in sentences."""
    changed = [
        name
        for name in (*REPLACED_BY_TRACE, "speed_jitter")
        if getattr(arguments, name) != _parser().get_default(name)
    ]
    if arguments.trace and (given := [name for name in changed if name in REPLACED_BY_TRACE]):
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        yield f"{flags}: no effect with --trace, which says when what fails for how long."
    rounds = [name for name in (*ROUND_FLAGS, "wait") if getattr(arguments, name) is not None]
    if not arguments.table and not rounds and "speed_jitter" in changed:
        yield "--speed-jitter: no effect where no rounds are played; give --wait overlap, say."
    if arguments.wait in (None, "never") and rounds:
        yield (
            "--wait never: nobody waits, so goodput is that without rounds; contributors follow "
            "from the other flags."
        )


def _rules(arguments: argparse.Namespace) -> RoundRules | None:
    """None: no flag of the rounds was given, and they need not be played."""
    given = {name: getattr(arguments, name) for name in (*ROUND_FLAGS, "wait")}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if "quorum" in given:
        whole = given["quorum"] == "all"
        given["quorum"] = None if whole else integers("--quorum", given["quorum"])[0]
    if "speeds" in given:
        try:
            given["speeds"] = tuple(float(part) for part in given["speeds"].split(","))
        except ValueError:
            raise ValueError(
                f"--speeds is {given['speeds']!r}; allowed: numbers, as 1,0.85."
            ) from None
    return RoundRules(**given)


def _played(fleet: Fleet) -> dict[str, Any]:
    assert fleet.rounds is not None  # asked for by the caller
    return {
        "learners": fleet.row.learners,
        "elastic": fleet.row.elastic,
        "chips": fleet.row.chips,
        "rounds": fleet.rounds.rounds,
        "contributors": fleet.rounds.contributors,
    }


def _parameters(arguments: argparse.Namespace) -> FleetParameters:
    return FleetParameters(
        mtbi_years=arguments.mtbi_years,
        slice_chips=arguments.slice_chips,
        downscale_s=arguments.downscale_s,
        upscale_s=arguments.upscale_s,
        upscale_batch_s=arguments.upscale_batch_s,
        step_s=arguments.step_s,
        recovery=ExponentiatedWeibull(
            arguments.recovery_s, arguments.recovery_a, arguments.recovery_c
        ),
        speed_jitter=arguments.speed_jitter,
        days=arguments.days,
    )


def _parser() -> argparse.ArgumentParser:
    default, rules = FleetParameters(), RoundRules()
    about = " (default: %(default)s)"
    parser = OneLineParser(
        prog="dd-lightning goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--table", choices=["paper"], help="the paper's table beside ours, all sizes, and its "
        "heterogeneous and scavenging results")  # fmt: skip
    add("--learners", metavar="M,...", help="1 gives both rows; default: 1,2,4,8,16")
    add("--chips", metavar="N,...", help="of the whole fleet; default: 150k to 2.4M")
    add("--days", type=float, default=default.days, help="simulated" + about)
    add("--seed", type=int, default=1, help="of the failures" + about)
    failures = parser.add_argument_group("failures")
    add = failures.add_argument
    add("--mtbi-years", type=float, default=default.mtbi_years,
        help="mean time between interruptions of a chip" + about)  # fmt: skip
    add("--trace", type=Path, metavar="CSV",
        help="time,component,seconds_down instead of random failures")  # fmt: skip
    add("--slice-chips", type=int, default=default.slice_chips,
        help="chips that fail together" + about)  # fmt: skip
    add("--downscale-s", type=float, default=default.downscale_s,
        help="dead time of a failure" + about)  # fmt: skip
    add("--upscale-s", type=float, default=default.upscale_s, help="dead time of a return" + about)
    add("--upscale-batch-s", type=float, default=default.upscale_batch_s,
        help="returned slices wait so long for others" + about)  # fmt: skip
    add("--step-s", type=float, default=default.step_s,
        help="of a step: a failure loses the one in progress" + about)  # fmt: skip
    add("--recovery-s", type=float, default=default.recovery.mean_s,
        help="mean time until a failed slice is back, exponentiated Weibull" + about)  # fmt: skip
    add("--recovery-a", type=float, default=default.recovery.a, help="its exponent" + about)
    add("--recovery-c", type=float, default=default.recovery.c, help="its shape" + about)
    add = parser.add_argument_group("rounds (played where one of these is given)").add_argument
    add("--wait", choices=["never", "overlap"], help=f"for rounds; default: {rules.wait}")
    add("--quorum", metavar="K|all", help=f"that closes a round; default: {rules.quorum}")
    add("--grace-s", type=float, help=f"for those after the quorum; default: {rules.grace_s:g}")
    add("--round-s", type=float, help=f"work of a round; default: {rules.round_s:g}")
    add("--speeds", metavar="V,...", help="relative, learner k takes entry k; default: 1")
    add("--speed-jitter", type=float, default=default.speed_jitter,
        help="standard deviation of a round's work, as a share" + about)  # fmt: skip
    add = parser.add_argument_group("output").add_argument
    add("--scavenge", metavar="T:X,...", help="wall time with X times the chips on top from T on "
        "(share of the run without), as 0.5:1,0.8:0")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="write a figure: .png, .pdf or .svg")
    add("--json", action="store_true", help="print one JSON object")
    return parser
