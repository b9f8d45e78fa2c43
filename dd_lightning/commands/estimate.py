"""`dd-lightning estimate`: bytes, times and memory of a run before it is started."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dd_lightning.commands.parsing import OneLineParser
from dd_lightning.simulate.estimate import DEFAULT_MEMORY_BYTES, Estimate, estimate
from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.goodput import simulate_fleet

CONFIG_MODULE = "dd_lightning.conf"
ENDLESS = -1  # as trainer.max_steps
UNKNOWN_STEP_S = 1.0


def main(argv: list[str] | None = None) -> int:
    """Estimate and print; exit 0. Raises ValueError for a wrong setting."""
    arguments = _parser().parse_intermixed_args(argv)
    _check_flags(arguments)
    values = _compose(arguments.overrides)
    from dd_lightning.launch import data_parallel
    from dd_lightning.launch.settings import check

    if data_parallel.is_chosen(values):
        raise ValueError(
            "algorithm is 'data_parallel'; allowed: the others, which have rounds and a syncer to "
            "estimate. Simulate the baseline instead (mode=simulate)."
        )
    settings = check(values)
    given = arguments.parameters
    parameters = _count(settings.values) if given is None else given
    step_s = _step_s(settings.values) if arguments.step_s is None else arguments.step_s
    steps = settings.values["trainer"]["max_steps"] if arguments.steps is None else arguments.steps
    found = estimate(
        int(parameters),
        settings.syncer,
        settings.network,
        step_s,
        steps if steps != ENDLESS else None,
        1e9 * arguments.memory_gb,
    )
    goodput = None
    if arguments.chips is not None:
        years = arguments.mtbi_years
        fleet = FleetParameters() if years is None else FleetParameters(mtbi_years=years)
        learners = settings.values["learners"]
        goodput = simulate_fleet(
            learners, arguments.chips, True, fleet, settings.values["seed"]
        ).goodput
    if arguments.json:
        given_too = {"parameters": int(parameters), "step_s": step_s, "steps": steps}
        print(json.dumps(found.to_dict() | given_too | {"goodput": goodput}))
    else:
        _show(found, int(parameters), step_s, steps, goodput)
    return 0


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.parameters is not None and not 0 < arguments.parameters < float("inf"):
        raise ValueError(f"--parameters is {arguments.parameters:g}; allowed: a number above 0.")
    if arguments.mtbi_years is not None and arguments.chips is None:
        print("warning: --mtbi-years: no effect without --chips.", file=sys.stderr)


def _compose(overrides: list[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from dd_lightning.launch.refusals import one_line

    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            config = compose("config", overrides=overrides)
        values = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_line(error)) from error
    assert isinstance(values, dict)  # a Hydra configuration is a mapping
    return values


def _count(values: dict[str, Any]) -> int:
    """Trainable elements of the task's module."""
    from dd_lightning.launch.task import build_module

    module = build_module(values)
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _step_s(values: dict[str, Any]) -> float:
    """Of the configuration: the simulated step, or the time to which steps are padded."""
    if values["mode"] == "simulate":
        return float(values["simulate"]["step_s"])
    return float(values["launcher"]["step_floor_s"]) or UNKNOWN_STEP_S


def _show(
    found: Estimate, parameters: int, step_s: float, steps: int, goodput: float | None
) -> None:
    run = "without end" if steps == ENDLESS else f"of {steps} steps"
    print(
        f"{parameters:,} parameters, {len(found.learners)} learners, a run {run} of {step_s:g} s: "
        f"effective H {found.effective_h:.1f} ({found.steady_h:.1f} without start and end), "
        f"{found.in_flight} rounds in flight"
    )
    print(
        f"{'learner':<8}{'region':<16}{'rtt ms':>8}{'up s':>9}{'down s':>9}{'rho s':>9}"
        f"{'latency':>9}{'stale':>7}{'lat/H':>7}{'up/step':>11}{'down/step':>11}{'link':>6}"
    )
    for row in found.learners:
        print(
            f"{row.learner:<8}{row.region:<16}{row.rtt_ms:>8.1f}{row.transfer_up_s:>9.3f}"
            f"{row.transfer_down_s:>9.3f}{row.rho_s:>9.3f}{row.latency_steps:>9.1f}"
            f"{row.staleness:>7}{row.overwrite_cost:>7.0%}{_size(row.bytes_up_per_step):>11}"
            f"{_size(row.bytes_down_per_step):>11}{row.link_share:>6.0%}"
        )
    print(
        f"all learners: {_size(found.bytes_per_step)} a step, {_size(found.bytes_per_hour)} an "
        f"hour, egress of the syncer {_size(found.egress_per_day)} a day"
    )
    print(
        f"syncer: {_size(found.syncer_memory)} memory ({found.syncer_memory_share:.0%} of its "
        f"machine), {found.syncer_cpu_share:.0%} of a core; "
        f"boundary {found.boundary_share:.1%} of a step"
    )
    if goodput is not None:
        print(f"goodput under failures: {goodput:.1f}%")
    print(f"binding: {found.binding}")
    for sentence in found.advice:
        print(f"advice: {sentence}")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="dd-lightning estimate", description=__doc__)
    add = parser.add_argument
    add("--parameters", type=float, help="trainable elements; default: of the task's module")
    add("--step-s", type=float, help="seconds of one inner step; default: simulate.step_s under "
        "mode=simulate, else launcher.step_floor_s, else 1")  # fmt: skip
    add("--steps", type=int, help="of each learner, for the share of start and end; -1: a run "
        "without end; default: trainer.max_steps")  # fmt: skip
    add("--memory-gb", type=float, default=DEFAULT_MEMORY_BYTES / 1e9,
        help="of the syncer's machine; default: %(default)g")  # fmt: skip
    add("--chips", type=int, help="of the whole fleet: adds the goodput under failures")
    add("--mtbi-years", type=float, help="between failures of a chip; default: "
        f"{FleetParameters().mtbi_years:g}")  # fmt: skip
    add("--json", action="store_true")
    add("overrides", nargs="*", help="as for launch: network=us_eu learners=8 algorithm=paper ...")
    return parser
