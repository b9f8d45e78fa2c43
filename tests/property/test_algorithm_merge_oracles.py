"""Merge rules against float64 numpy oracles over random shapes, weights and values."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dd_lightning.algorithm import (
    BFloat16Codec,
    RadialDirectional,
    agreement,
    merge_fragment,
    radial_directional_average,
    weighted_average,
)

pytestmark = pytest.mark.property
LIMITED = settings(max_examples=60, deadline=None)


@st.composite
def contributions(draw, minimum=1):
    """Draw (gradients, weights): float32 or float64 of one shape, some zero, weights mixed."""
    count = draw(st.integers(minimum, 6))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    scales = draw(st.lists(st.sampled_from([0.0, 1e-4, 1.0, 50.0]), min_size=count, max_size=count))
    gradients = [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for scale in scales
    ]
    positive = st.one_of(st.just(0.0), st.floats(1e-3, 1e9))
    weights = draw(st.lists(positive, min_size=count, max_size=count))
    assume(any(weights))
    return gradients, weights


def oracle_average(vectors, weights):
    return np.tensordot(weights, vectors, axes=1) / np.sum(weights)


def oracle_directions(vectors, weights):
    norms = np.sqrt((vectors.reshape(len(vectors), -1) ** 2).sum(axis=1))
    phi = np.stack([v / n if n else v * 0 for v, n in zip(vectors, norms, strict=True)])
    return norms, oracle_average(phi, weights)


def oracle_rda(vectors, weights):
    norms, mean = oracle_directions(vectors, weights)
    length = np.sqrt((mean**2).sum())
    if (weights > 0).sum() == 1 or length < 1e-3:
        return oracle_average(vectors, weights)
    return (weights @ norms) / weights.sum() * mean / length


def arrays(gradients, weights):
    return np.stack([g.double().numpy() for g in gradients]), np.array(weights)


def close(got, expected, gradients):
    """Compare up to the rounding of the result's dtype, relative to the largest input."""
    eps = 1e-6 if got.dtype == torch.float32 else 1e-12
    largest = max(float(g.abs().max()) for g in gradients)
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=eps, atol=eps * largest)


@LIMITED
@given(contributions())
def test_weighted_average_equals_numpy(drawn):
    gradients, weights = drawn
    got = weighted_average(gradients, weights)
    assert got.shape == gradients[0].shape and got.dtype == gradients[0].dtype
    close(got, oracle_average(*arrays(gradients, weights)), gradients)


@LIMITED
@given(contributions())
def test_radial_directional_average_equals_numpy(drawn):
    gradients, weights = drawn
    vectors, w = arrays(gradients, weights)
    length = np.sqrt((oracle_directions(vectors, w)[1] ** 2).sum())
    assume(abs(length - 1e-3) > 1e-9)  # the two branches differ: no rounding may choose
    got = radial_directional_average(gradients, weights)
    assert got.shape == gradients[0].shape and got.dtype == gradients[0].dtype
    eps = 1e-6 if got.dtype == torch.float32 else 1e-9
    largest = np.abs(vectors).max()
    expected = oracle_rda(vectors, w)
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=eps, atol=eps * largest)


@LIMITED
@given(contributions())
def test_rda_has_the_mean_length_unless_directions_cancel(drawn):
    gradients, weights = drawn
    assume(agreement(gradients, weights) > 2e-3)
    norms = [float(g.double().norm()) for g in gradients]
    mean = sum(w * n for w, n in zip(weights, norms, strict=True)) / sum(weights)
    got = float(radial_directional_average(gradients, weights).double().norm())
    assert got == pytest.approx(mean, rel=1e-5)
    # never shorter than the average: that is why it is used
    assert got >= float(weighted_average(gradients, weights).double().norm()) * (1 - 1e-5)


@LIMITED
@given(contributions())
def test_agreement_equals_numpy_and_lies_in_the_unit_interval(drawn):
    gradients, weights = drawn
    mean = oracle_directions(*arrays(gradients, weights))[1]
    got = agreement(gradients, weights)
    assert 0.0 <= got <= 1.0 + 1e-12
    assert got == pytest.approx(np.sqrt((mean**2).sum()), rel=1e-9, abs=1e-9)


@LIMITED
@given(contributions(minimum=2), st.randoms(use_true_random=False))
def test_order_of_summation_moves_only_the_last_digits(drawn, random):
    gradients, weights = drawn
    order = list(range(len(weights)))
    random.shuffle(order)
    shuffled = [gradients[i] for i in order], [weights[i] for i in order]
    close(weighted_average(*shuffled), weighted_average(*drawn).double().numpy(), gradients)


@LIMITED
@given(contributions(minimum=2))
def test_merging_is_bitwise_repeatable_whatever_the_order_of_names(drawn):
    gradients, weights = drawn
    sent = [{"b": g, "a": g * 2, "c": g.flatten()} for g in gradients]
    turned = [dict(reversed(list(c.items()))) for c in sent]
    rule = RadialDirectional(min_numel=4)
    first, agreed, _ = merge_fragment(sent, weights, rule, frozenset({"c"}))
    again, agreed_again, _ = merge_fragment(turned, weights, rule, frozenset({"c"}))
    assert list(first) == list(again) == ["a", "b", "c"] and agreed == agreed_again
    assert all(torch.equal(first[name], again[name]) for name in first)


@LIMITED
@given(contributions())
def test_bf16_round_trip_is_within_half_a_unit_and_stable(drawn):
    codec = BFloat16Codec()
    for gradient in drawn[0]:
        back = codec.decode(codec.encode(gradient), gradient.shape, "float32")
        error = (back.double() - gradient.double()).abs()
        assert bool((error <= gradient.double().abs() * 2**-8).all())
        assert torch.equal(codec.decode(codec.encode(back), back.shape, "float32"), back)
