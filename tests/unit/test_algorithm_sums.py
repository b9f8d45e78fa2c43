"""Sums by pieces equal whole float64 arithmetic, and one set of passes gives RDA and agreement."""

import pytest
import torch

from dd_lightning.algorithm import (
    RadialDirectional,
    agreement,
    merge_fragment,
    radial_directional_average,
    sums,
    weighted_average,
)
from dd_lightning.algorithm import merge as merge_module

pytestmark = pytest.mark.unit
WEIGHTS = [0.3, 1.7, 2.9]


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    size = 2 * sums.CHUNK + 17  # three pieces, the last one short
    made = [torch.randn(size, generator=generator) for _ in WEIGHTS]
    return [made[0], made[1].to(torch.bfloat16), made[2].view(1, -1).t()[:, 0]]


def widest(seen):
    """A torch function mode's most elements of a float64 result."""
    return max((t.numel() for t in seen if t.dtype == torch.float64), default=0)


class _Results(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.append(result)
        return result


def test_the_average_is_bitwise_that_of_whole_float64_tensors(gradients):
    total = gradients[0].double() * WEIGHTS[0]
    for gradient, weight in zip(gradients[1:], WEIGHTS[1:], strict=True):
        total += gradient.double() * weight
    expected = (total / sum(WEIGHTS)).float()
    assert torch.equal(weighted_average(gradients, WEIGHTS), expected)


def test_no_float64_tensor_is_larger_than_a_piece(gradients):
    with _Results() as results:
        weighted_average(gradients, WEIGHTS)
        radial_directional_average(gradients, WEIGHTS)
    assert 0 < widest(results.seen) <= sums.CHUNK


def test_norms_equal_those_of_whole_tensors_and_repeat_bitwise(gradients):
    for gradient in gradients:
        assert sums.norm(gradient) == pytest.approx(float(gradient.double().norm()), rel=1e-12)
        assert sums.norm(gradient) == sums.norm(gradient.clone())
    whole = sum(w * g.double() for w, g in zip(WEIGHTS, gradients, strict=True))
    assert sums.sum_norm(gradients, WEIGHTS) == pytest.approx(float(whole.norm()), rel=1e-12)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (4, 5)])
def test_shapes_are_kept_those_without_elements_too(shape):
    ones = [torch.ones(shape), torch.ones(shape)]
    for merged in (weighted_average(ones, [1, 3]), radial_directional_average(ones, [1, 3])):
        assert merged.shape == shape and torch.equal(merged, torch.ones(shape))


def test_rda_and_its_agreement_come_from_the_same_passes(gradients, monkeypatch):
    calls = []
    counted = merge_module.sum_norm
    monkeypatch.setattr(merge_module, "sum_norm", lambda *args: calls.append(1) or counted(*args))
    contributions = [{"weight": gradient} for gradient in gradients]
    merged, agreed, _ = merge_fragment(contributions, WEIGHTS, RadialDirectional())
    assert len(calls) == 1
    assert agreed == agreement(gradients, WEIGHTS)
    assert torch.equal(merged["weight"], radial_directional_average(gradients, WEIGHTS))
