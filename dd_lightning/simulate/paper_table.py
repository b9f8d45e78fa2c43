"""The paper's goodput table, ours beside it, and its two other systems results."""

from __future__ import annotations

from typing import Any

from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.goodput import FleetRow, simulate_fleet
from dd_lightning.simulate.waiting import goodput_of_quorum, scavenged_time

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

HETEROGENEOUS = (1.0,) * 4 + (1.18,) * 4  # seconds per round: four learners 18% slower
EXTRA_CHIPS = (0.0, 0.25, 0.5, 1.0, 3.0)
SCAVENGING = {0.0: 1.00, 0.25: 0.90, 0.5: 0.83, 1.0: 0.75, 3.0: 0.62}


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
    jitter = parameters.speed_jitter
    return {
        "heterogeneous": {
            "K=8, wait: overlap": 100 * goodput_of_quorum(HETEROGENEOUS, 8, jitter, seed),
            "K=1, wait: never": 100 * goodput_of_quorum(HETEROGENEOUS, 1, jitter, seed, False),
            "paper": {"K=8": 84, "K=1": 100},
        },
        "scavenging": {
            f"{extra:g}": {"decoupled": scavenged_time(extra), "paper": SCAVENGING[extra]}
            for extra in EXTRA_CHIPS
        },
    }
