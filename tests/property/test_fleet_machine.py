"""Item 1 of the failure tests: the round machine under any order of faults (`tests/fleet_machine`).

The default run draws the same examples everywhere; `slow` draws new ones each time, and prints how
to repeat what fails.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fleet_machine import FleetMachine

pytestmark = [pytest.mark.property, pytest.mark.timeout(900)]  # to shrink what fails takes long
QUIET = settings(
    deadline=None,
    print_blob=True,
    stateful_step_count=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_any_order_of_faults() -> None:
    run_state_machine_as_test(
        FleetMachine, settings=settings(QUIET, max_examples=60, derandomize=True)
    )


@pytest.mark.slow
def test_many_orders_of_faults() -> None:
    run_state_machine_as_test(
        FleetMachine, settings=settings(QUIET, max_examples=3000, stateful_step_count=20)
    )
