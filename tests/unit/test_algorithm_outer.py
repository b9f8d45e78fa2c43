"""The outer optimizer: the specification's arithmetic, bit for bit, and refusals."""

import pytest
import torch
from torch import nn

from dd_lightning.algorithm import DEFAULT_OUTER, build_outer_optimizer, check_outer

pytestmark = pytest.mark.unit


def step(optimizer, theta, delta):
    theta.grad = delta.clone()
    optimizer.step()


@pytest.mark.parametrize(
    ("spec", "buffer", "expected"),
    [
        ({"lr": 1.0, "momentum": 0.0}, None, 7.0),
        ({"lr": 0.7, "momentum": 0.9}, 3.0, 4.309),
        (None, 3.0, 4.309),  # the defaults
        ({}, 3.0, 4.309),
        ({"momentum": 0.9}, 3.0, 4.309),
    ],
)
def test_known_values(spec, buffer, expected):
    theta = nn.Parameter(torch.tensor([10.0]))
    optimizer = build_outer_optimizer([theta], spec)
    if buffer is not None:
        optimizer.state[theta]["momentum_buffer"] = torch.tensor([buffer])
    step(optimizer, theta, torch.tensor([3.0]))
    assert theta.item() == pytest.approx(expected, rel=1e-6)
    if buffer is not None:
        assert optimizer.state[theta]["momentum_buffer"].item() == pytest.approx(5.7)


def test_lr_1_without_momentum_is_bitwise_theta_minus_delta():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10_007, generator=generator)
    local = start + 1e-3 * torch.randn(10_007, generator=generator)
    theta = nn.Parameter(start.clone())
    step(build_outer_optimizer([theta], {"lr": 1.0, "momentum": 0.0}), theta, start - local)
    assert torch.equal(theta.data, start - (start - local))


def test_default_equals_the_recurrence_over_many_steps():
    generator = torch.Generator().manual_seed(1)
    theta = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
    expected, buffer = theta.detach().clone(), torch.zeros(5, dtype=torch.float64)
    optimizer = build_outer_optimizer([theta], {"lr": 0.7, "momentum": 0.3})
    for _ in range(6):
        delta = torch.randn(5, generator=generator, dtype=torch.float64)
        step(optimizer, theta, delta)
        buffer = 0.3 * buffer + delta
        expected = expected - 0.7 * (delta + 0.3 * buffer)
    torch.testing.assert_close(theta.data, expected, rtol=1e-12, atol=1e-12)


def test_default_improves_a_quadratic():
    theta = nn.Parameter(torch.full((3,), 4.0))
    optimizer = build_outer_optimizer([theta])
    for _ in range(100):
        step(optimizer, theta, 0.2 * theta.detach())
    assert float(theta.detach().norm()) < 0.01


def test_any_torch_optimizer_may_take_its_place():
    theta = nn.Parameter(torch.zeros(2))
    spec = {"_target_": "torch.optim.Adam", "lr": 0.1, "betas": (0.5, 0.9)}
    optimizer = build_outer_optimizer([theta], spec)
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["lr"] == 0.1 and optimizer.defaults["betas"] == (0.5, 0.9)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"lr": 0}, "outer.lr is 0; allowed: a finite number > 0"),
        ({"lr": -1.0}, "outer.lr is -1"),
        ({"lr": float("nan")}, "outer.lr is nan"),
        ({"lr": "fast"}, "outer.lr is 'fast'"),
        ({"momentum": 1.0}, r"outer.momentum is 1.0; allowed: .* >= 0 and < 1"),
        ({"momentum": -0.1}, "outer.momentum is -0.1"),
        ({"lr": 1, "beta": 3}, r"outer is \['beta'\]; allowed: the keys lr, momentum.*_target_"),
        ({"_target_": "torch.optim.Adam", "momentum": 0.9}, "outer .Adam. .*keys lr, betas"),
        ({"_target_": "torch.optim.Nope"}, "outer._target_ is 'torch.optim.Nope'"),
        ({"_target_": "Adam"}, "dotted path of a class"),
        ({"_target_": "torch.nn.Linear"}, "a class of torch.optim.Optimizer"),
        ({"_target_": "torch.zeros"}, "a class, not a builtin"),
    ],
)
def test_wrong_settings_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        check_outer(spec)


def test_the_spec_is_not_changed():
    spec = {"_target_": "torch.optim.SGD", "lr": 0.1}
    build_outer_optimizer([nn.Parameter(torch.zeros(1))], spec)
    assert spec == {"_target_": "torch.optim.SGD", "lr": 0.1}
    assert DEFAULT_OUTER == {"lr": 0.7, "momentum": 0.9}
