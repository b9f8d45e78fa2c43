"""Outer gradients: widening, re-anchoring, and what 16-bit learners really held."""

import pytest
import torch

from dd_lightning.algorithm import from_delta, outer_gradient, reanchored

pytestmark = pytest.mark.unit


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(3)
    return lambda dtype=torch.float32: torch.randn(5, 7, generator=generator).to(dtype)


def test_outer_gradient_is_old_global_minus_local(draw):
    theta, local = draw(), draw()
    assert torch.equal(outer_gradient(theta, local), theta - local)
    # theta - (theta - local) is what lr 1 without momentum does to a single learner
    assert torch.allclose(theta - outer_gradient(theta, local), local)


@pytest.mark.parametrize(
    ("global_dtype", "local_dtype", "result"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_outer_gradient_widens_before_it_subtracts(draw, global_dtype, local_dtype, result):
    theta, local = draw(global_dtype), draw(local_dtype)
    got = outer_gradient(theta, local)
    assert got.dtype == result
    assert torch.equal(got, theta.to(result) - local.to(result))


def test_shapes_must_be_equal():
    message = r"global_ has shape \(2,\), local \(1,\).*compare their layouts"
    with pytest.raises(ValueError, match=message):
        outer_gradient(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"base has shape \(2, 1\), delta \(2,\)"):
        from_delta(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2))


def test_at_the_same_version_the_first_bracket_is_not_computed():
    # inf - inf would be NaN, and 0 + -0.0 would lose the sign
    base = torch.tensor([float("inf"), 1.0])
    delta = torch.tensor([2.0, -0.0])
    got = from_delta(base, base, delta)
    assert torch.equal(got, delta) and bool(torch.signbit(got[1]))


def test_a_delta_is_reanchored_at_the_current_global(draw):
    base, current, local = draw(), draw(), draw()
    delta = outer_gradient(base, local)
    assert torch.equal(from_delta(current, base, delta), (current - base) + delta)
    assert torch.allclose(from_delta(current, base, delta), current - local, atol=1e-6)
    assert torch.equal(reanchored(current, base, local), (current - base) + (base - local))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_learner_that_did_not_move_has_no_outer_gradient(draw, dtype):
    base = draw()
    local = base.to(dtype)
    assert not torch.equal(outer_gradient(base, local), torch.zeros_like(base))
    assert torch.equal(reanchored(base, base, local), torch.zeros_like(base))
    # its values came as float32 over the wire: only local_dtype tells what it held
    assert torch.equal(reanchored(base, base, local.float(), dtype), torch.zeros_like(base))
    # others have moved the global since: that, and only that, is its outer gradient
    current = draw()
    assert torch.equal(reanchored(current, base, local), current - base)
