"""Merge rules on known values, and the merge of a whole fragment."""

import math

import pytest
import torch

from dd_lightning.algorithm import (
    MERGE_RULES,
    Average,
    RadialDirectional,
    agreement,
    merge_fragment,
    outer_gradient,
    radial_directional_average,
    token_weight,
    weighted_average,
)

pytestmark = pytest.mark.unit
BOTH_RULES = pytest.mark.parametrize("merge", [weighted_average, radial_directional_average])


@pytest.mark.parametrize(
    ("gradients", "weights", "expected"),
    [
        ([[2, 0], [0, 2]], [1, 1], [1.41421356, 1.41421356]),
        ([[2, 0], [0, 2]], [3, 1], [1.8973666, 0.6324555]),
        ([[0, 0], [1, 0]], [1, 1], [0.5, 0.0]),
        ([[3, 4], [1, 0]], [1, 1], [2.68328157, 1.34164079]),
        ([[1, 0], [-1, 0]], [1, 1], [0.0, 0.0]),  # directions cancel: the average
        ([[3, 0], [-1, 0]], [1, 1], [1.0, 0.0]),
        ([[3, 0], [-1, 1e-5]], [1, 1], [1.0, 5e-6]),  # nearly: 5e-6 is below 1e-3
        ([[3, 0], [-1, 1e-5]], [1e6, 1e6], [1.0, 5e-6]),  # whatever the scale of weights
        ([[0, 0], [0, 0]], [1, 2], [0.0, 0.0]),
    ],
)
def test_radial_directional_average_known_values(gradients, weights, expected):
    got = radial_directional_average([torch.tensor(g).float() for g in gradients], weights)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_directions_that_cancel_exactly_are_averaged_without_any_threshold():
    opposed = [torch.tensor([3.0, 0.0]), torch.tensor([-1.0, 0.0])]
    assert radial_directional_average(opposed, [1, 1], cancel_below=0).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("count", [2, 4, 16])
def test_orthogonal_unit_vectors_keep_their_length(count):
    units, weights = list(torch.eye(count)), [1.0] * count
    average, rda = weighted_average(units, weights), radial_directional_average(units, weights)
    assert float(rda.norm()) == pytest.approx(1.0)
    assert float(average.norm()) == pytest.approx(1 / math.sqrt(count))
    assert agreement(units, weights) == pytest.approx(1 / math.sqrt(count))


def test_weighted_average_of_the_specification():
    theta = torch.tensor([5.0])
    moves = [outer_gradient(theta, torch.tensor([local])) for local in (3.0, 1.0)]
    weights = [token_weight(10, 1), token_weight(10, 2)]
    assert weights == [100, 50]
    assert weighted_average(moves, weights).item() == pytest.approx(2.6666667)


@BOTH_RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_positive_weight_gives_that_gradient_exactly(merge, dtype):
    generator = torch.Generator().manual_seed(0)
    # enough of them that w * v / w rounds somewhere, float64 included
    only = torch.randn(1000, generator=generator, dtype=torch.float64).to(dtype)
    other = torch.full((1000,), float("nan"))  # would show in any arithmetic
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = merge([other, only, other], [0, 0.3, 0.0])
    assert got.dtype == wide and torch.equal(got, only.to(wide))


@BOTH_RULES
def test_python_lists_are_accepted_and_inputs_are_not_changed(merge):
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    assert torch.equal(merge([a, b], [1, 1]), merge([[3.0, 4.0], [1.0, 0.0]], [1, 1]))
    assert a.tolist() == [3.0, 4.0] and b.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("merge", [weighted_average, radial_directional_average, agreement])
@pytest.mark.parametrize(
    ("gradients", "weights", "message"),
    [
        ([], [], "0 contributions and 0 weights"),
        ([[1.0]], [1, 2], "1 contributions and 2 weights"),
        ([[1.0], [1.0, 2.0]], [1, 1], r"shapes \[\(1,\), \(2,\)\]"),
        ([[1.0], [2.0]], [1, -1], "weights are .* finite numbers >= 0"),
        ([[1.0], [2.0]], [1, math.nan], "weights are .* finite numbers >= 0"),
        ([[1.0], [2.0]], [1, math.inf], "weights are .* finite numbers >= 0"),
        ([[1.0], [2.0]], [0, 0], "sum above 0"),
    ],
)
def test_bad_input_is_refused(merge, gradients, weights, message):
    with pytest.raises(ValueError, match=message):
        merge(gradients, weights)


def test_agreement_tells_parallel_from_opposed():
    v = torch.tensor([1.0, 2.0])
    assert agreement([v, 5 * v], [1, 3]) == pytest.approx(1.0)
    assert agreement([v, -v], [1, 1]) == pytest.approx(0.0)
    assert agreement([v, -v], [3, 1]) == pytest.approx(0.5)
    assert agreement([v, 0 * v], [1, 1]) == pytest.approx(0.5)
    assert agreement([v], [2]) == 1.0 and agreement([0 * v], [2]) == 0.0


def test_rda_averages_small_tensors_and_only_those():
    def opposed(size):
        a, b = torch.zeros(size), torch.zeros(size)
        a[0], b[1] = 1.0, 1.0
        return [a, b]

    for size, rule in ((15, weighted_average), (16, radial_directional_average)):
        expected = rule(opposed(size), [1.0, 1.0])
        assert torch.equal(RadialDirectional()(opposed(size), [1.0, 1.0]), expected)
    everything = RadialDirectional(min_numel=0)(opposed(2), [1.0, 1.0])
    assert float(everything.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "options", [{"min_numel": -1}, {"cancel_below": -0.1}, {"cancel_below": 2}]
)
def test_rda_options_are_validated(options):
    with pytest.raises(ValueError, match=f"merge.{next(iter(options))} is"):
        RadialDirectional(**options)


@pytest.fixture
def contributions():
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "wte": torch.randn(8, 4, generator=generator),
            "fc": torch.randn(4, 4, generator=generator),
            "bias": torch.randn(4, generator=generator),
        }
        for _ in range(3)
    ]


def test_merge_fragment_applies_the_rule_of_each_tensor(contributions):
    weights = [1.0, 2.0, 3.0]
    names = frozenset({"wte"})
    delta, *_ = merge_fragment(contributions, weights, RadialDirectional(), names)

    def values(name):
        return [contribution[name] for contribution in contributions]

    assert list(delta) == ["bias", "fc", "wte"]
    assert torch.equal(delta["wte"], weighted_average(values("wte"), weights))
    assert torch.equal(delta["fc"], radial_directional_average(values("fc"), weights))
    assert torch.equal(delta["bias"], weighted_average(values("bias"), weights))
    assert not torch.equal(delta["fc"], weighted_average(values("fc"), weights))


def test_merge_fragment_agreement_is_the_mean_by_elements_over_ruled_tensors(contributions):
    weights = [1.0, 2.0, 3.0]
    _, got, _ = merge_fragment(contributions, weights, RadialDirectional(), frozenset({"wte"}))
    parts = {n: agreement([c[n] for c in contributions], weights) for n in ("fc", "bias", "wte")}
    assert got == pytest.approx((16 * parts["fc"] + 4 * parts["bias"]) / 20)
    _, got, _ = merge_fragment(contributions, weights, Average(), frozenset(parts))
    total = 16 * parts["fc"] + 4 * parts["bias"] + 32 * parts["wte"]
    assert got == pytest.approx(total / 52)


def test_merge_fragment_drops_weightless_contributions(contributions):
    poisoned = {name: torch.full_like(t, float("nan")) for name, t in contributions[0].items()}
    delta, agreed, _ = merge_fragment([poisoned, contributions[1]], [0, 7], MERGE_RULES["rda"]())
    assert all(torch.equal(delta[name], contributions[1][name]) for name in delta)
    assert agreed == 1.0


def test_merge_fragment_refuses_differing_names_and_a_wrong_rule(contributions):
    other = {name: tensor for name, tensor in contributions[0].items() if name != "fc"}
    with pytest.raises(ValueError, match=r"differ in the tensors \['fc'\]"):
        merge_fragment([contributions[0], other], [1, 1], Average())

    def flattening(gradients, weights):
        return weighted_average(gradients, weights).flatten()

    with pytest.raises(ValueError, match=r"rule function returned \(16,\) for fc.*\(4, 4\)"):
        merge_fragment(contributions, [1, 1, 1], flattening)


def test_cosine_is_the_mean_over_pairs_and_zero_gradients_are_in_none(contributions):
    weights = [1.0, 2.0, 3.0]
    idle = contributions + [{name: torch.zeros_like(t) for name, t in contributions[0].items()}]
    *_, got = merge_fragment(idle, [*weights, 4.0], RadialDirectional(), frozenset({"wte"}))
    total = 0.0
    for name, count in (("fc", 16), ("bias", 4)):
        rows = torch.stack([c[name].flatten() for c in contributions]).double()
        cosines = torch.corrcoef(torch.cat([rows, -rows], dim=1))[:3, :3]  # of means 0
        pairs = [(0, 1), (0, 2), (1, 2)]
        products = [weights[a] * weights[b] for a, b in pairs]
        found = sum(p * float(cosines[pair]) for p, pair in zip(products, pairs, strict=True))
        total += count * found / sum(products)
    assert got == pytest.approx(total / 20)
    assert merge_fragment(contributions[:1], [1.0], RadialDirectional())[2] is None
    opposed = [{"w": torch.ones(20)}, {"w": -torch.ones(20)}]
    assert merge_fragment(opposed, [1.0, 5.0], Average())[2] == pytest.approx(-1.0)
