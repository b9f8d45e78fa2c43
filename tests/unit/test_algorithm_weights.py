"""Weights of contributions and the paper's grace window: known values and refusals."""

import math

import pytest

from dd_lightning.algorithm import contribution_weight, grace_window, token_weight

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("tokens", "steps", "weight"),
    [(100, 10, 1000.0), (10, 1, 100.0), (10, 2, 50.0), (0, 3, 0.0), (7, 0, 0.0), (1, 3, 1 / 3)],
)
def test_token_weight_is_quantity_times_quality(tokens, steps, weight):
    assert token_weight(tokens, steps) == weight


def test_contribution_weight_is_capped_only_beyond_two_horizons():
    assert contribution_weight(480, 48, sync_every=24) == token_weight(480, 48)
    assert contribution_weight(300, 30, sync_every=24) == token_weight(300, 30)
    assert contribution_weight(960, 96, sync_every=24) == token_weight(960, 96) / 2
    # ten times longer away at the same speed does not weigh more than two horizons do
    assert contribution_weight(4800, 480, 24) == pytest.approx(contribution_weight(480, 48, 24))
    assert contribution_weight(5, 0, 24) == 0.0


def test_uniform_weights_count_who_contributes_and_nothing_else():
    assert [contribution_weight(tokens, 3, 8, "uniform") for tokens in (1, 80, 10_000)] == [1.0] * 3
    assert contribution_weight(960, 96, 24, "uniform") == 1.0  # also beyond two horizons
    assert contribution_weight(0, 3, 8, "uniform") == contribution_weight(3, 0, 8, "uniform") == 0.0
    with pytest.raises(ValueError, match=r"algorithm.weights is 'equal'.*tokens.*uniform"):
        contribution_weight(1, 1, 8, "equal")


@pytest.mark.parametrize("arguments", [(-1, 1), (1, -1), (math.nan, 1), (1, math.inf), (True, 1)])
def test_broken_counters_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=r"(tokens|steps) is .*allowed: a finite number >= 0"):
        token_weight(*arguments)


@pytest.mark.parametrize("sync_every", [0, -3, 2.5, True])
def test_contribution_weight_refuses_a_broken_horizon(sync_every):
    with pytest.raises(ValueError, match=r"sync_every is .* allowed: an integer from 1"):
        contribution_weight(1, 1, sync_every)


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ({"overlap": 2, "step": 1, "quorum": 0.5, "sync": 0.5}, 0.8),
        ({"overlap": 2, "step": 1, "quorum": 2, "sync": 0.5}, 0.0),  # no slack left
        ({"overlap": 9, "step": 1, "quorum": 0, "sync": 0}, 1.0),  # the default cap: one step
        ({"overlap": 9, "step": 1, "quorum": 0, "sync": 0, "cap": 3.0}, 3.0),
        ({"overlap": 2, "step": 1, "quorum": 0.5, "sync": 0.5, "safety": 0.5}, 0.5),
        ({"overlap": 0, "step": 1, "quorum": 0, "sync": 0}, 0.0),
        ({"overlap": 2, "step": 1, "quorum": 0, "sync": 0, "cap": 0.0}, 0.0),
    ],
)
def test_grace_window(arguments, seconds):
    assert grace_window(**arguments) == pytest.approx(seconds, abs=1e-12)


@pytest.mark.parametrize("name", ["overlap", "step", "quorum", "sync", "safety", "cap"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_grace_window_names_the_broken_argument(name, value):
    good = {"overlap": 2, "step": 1.0, "quorum": 0.5, "sync": 0.5, "safety": 0.8, "cap": 1.0}
    with pytest.raises(ValueError, match=f"^{name} is "):
        grace_window(**(good | {name: value}))


def test_grace_window_refuses_more_than_the_whole_slack():
    with pytest.raises(ValueError, match=r"safety is 1.5; allowed: .* <= 1"):
        grace_window(2, 1, 0, 0, safety=1.5)
