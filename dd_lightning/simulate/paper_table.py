"""The paper's goodput table, ours beside it, and its two other systems results."""

from __future__ import annotations

from typing import Any

from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.goodput import FleetRow, simulate_fleet
from dd_lightning.simulate.scavenging import data_parallel_slowdown, wall_time
from dd_lightning.simulate.waiting import RoundRules, simulate_rounds

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

PAPER: dict[tuple[int, bool], tuple[int, ...]] = {
    (1, False): (72, 57, 38, 27, 18),
    (1, True): (88, 80, 69, 58, 40),
    (2, True): (94, 88, 80, 70, 54),
    (4, True): (96, 93, 89, 82, 73),
    (8, True): (98, 96, 94, 88, 80),
    (16, True): (99, 98, 96, 93, 86),
}
"""Goodput in percent by (learners, elastic) and `CHIPS` (arXiv 2604.21428)."""

HETEROGENEOUS = (1.0,) * 4 + (1 / 1.18,) * 4  # relative speeds: four learners 18% slower
ROUND_GRACE = 0.5  # of a round
HETEROGENEOUS_ROUNDS = 5_000
SCAVENGED_FROM = 0.5  # of the run without temporary chips
SCAVENGING = {
    0.0: (1.00, 1.00),
    0.25: (0.90, 1.07),
    0.5: (0.83, 1.09),
    1.0: (0.75, 1.02),
    3.0: (0.62, 0.80),
}
"""Wall time (decoupled, data-parallel) by temporary chips, relative to the run without them."""


def paper_rows(parameters: FleetParameters, seed: int) -> list[FleetRow]:
    """All 30 cells, simulated."""
    return [
        simulate_fleet(learners, chips, elastic, parameters, seed)
        for learners, elastic in PAPER
        for chips in CHIPS
    ]


def paper_value(row: FleetRow) -> int:
    """What the paper has for this cell."""
    return PAPER[row.learners, row.elastic][CHIPS.index(row.chips)]


def errors(rows: list[FleetRow]) -> tuple[float, float]:
    """(mean, largest) absolute difference to the paper, in points."""
    found = [abs(row.goodput - paper_value(row)) for row in rows]
    return sum(found) / len(found), max(found)


def other_results(parameters: FleetParameters, seed: int) -> dict[str, Any]:
    """Heterogeneous goodput (percent, by quorum) and scavenging (relative wall time)."""
    return {
        "heterogeneous": heterogeneous(parameters.speed_jitter, seed),
        "scavenging": {f"{extra:g}": _scavenged(extra) for extra in SCAVENGING},
    }


def heterogeneous(jitter: float, seed: int) -> dict[str, dict[str, float]]:
    """Four learners and four 18% slower: goodput and contributors by quorum and grace."""
    learners = len(HETEROGENEOUS)
    cases = {
        "K=8, wait: overlap": (RoundRules(None, "overlap", 0.0, 1.0, HETEROGENEOUS), 84),
        "K=1, wait: never": (RoundRules(1, "never", 0.0, 1.0, HETEROGENEOUS), 100),
        "K=1, grace, wait: never": (RoundRules(1, "never", ROUND_GRACE, 1.0, HETEROGENEOUS), 100),
    }
    found = {}
    for name, (rules, paper) in cases.items():
        rounds = simulate_rounds([()] * learners, rules, jitter, HETEROGENEOUS_ROUNDS, seed)
        found[name] = {
            "goodput": 100 * sum(rounds.stepping) / learners,
            "contributors": rounds.contributors,
            "paper": paper,
        }
    return found


def _scavenged(extra: float) -> dict[str, float]:
    capacity = [(SCAVENGED_FROM, extra)]
    decoupled, data_parallel = SCAVENGING[extra]
    return {
        "decoupled": wall_time(capacity),
        "paper": decoupled,
        "data_parallel": wall_time(capacity, data_parallel_slowdown),
        "paper_data_parallel": data_parallel,
    }
