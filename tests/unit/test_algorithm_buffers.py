"""Merged buffers: weighted means, and running statistics as those of the pooled samples."""

import pytest
import torch

from dd_lightning.algorithm import merge_buffers, running_pairs

pytestmark = pytest.mark.unit
PAIRS = [("bn.running_mean", "bn.running_var")]


def statistics(samples):
    return {
        "bn.running_mean": samples.mean(0),
        "bn.running_var": samples.var(0, unbiased=False),
    }


def test_running_statistics_equal_those_of_the_pooled_samples():
    generator = torch.Generator().manual_seed(1)
    groups = [
        torch.randn(count, 6, generator=generator, dtype=torch.float64) * scale + shift
        for count, scale, shift in ((10, 1.0, 0.0), (30, 0.2, 5.0), (5, 3.0, -2.0))
    ]
    merged = merge_buffers([statistics(g) for g in groups], [len(g) for g in groups], PAIRS)
    pooled = statistics(torch.cat(groups))
    for name, value in pooled.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-12, atol=1e-12)


def test_mixture_survives_a_mean_far_from_zero():
    # var + mean^2 - mean^2 in float32 would lose all of a variance of 1e-3 beside 1e8
    sent = [{PAIRS[0][0]: torch.tensor([1e4]), PAIRS[0][1]: torch.tensor([1e-3])}] * 2
    merged = merge_buffers(sent, [1, 3], PAIRS)
    assert merged[PAIRS[0][1]].item() == pytest.approx(1e-3, rel=1e-6)


def test_a_buffer_is_averaged_over_those_that_sent_it():
    sent = [{"a": torch.tensor([2.0])}, {"a": torch.tensor([6.0]), "b": torch.tensor([1.5])}, {}]
    merged = merge_buffers(sent, [3, 1, 5])
    assert merged["a"].item() == 3.0 and merged["b"].item() == 1.5
    assert sorted(merged) == ["a", "b"]


def test_a_variance_without_its_mean_stays_out_of_the_mixture():
    mean, var = PAIRS[0]
    full = {mean: torch.tensor([1.0]), var: torch.tensor([2.0])}
    got = merge_buffers([full, {var: torch.tensor([50.0])}], [1, 1], PAIRS)
    assert got[mean].item() == 1.0 and got[var].item() == 2.0
    alone = merge_buffers([{var: torch.tensor([2.0])}, {var: torch.tensor([4.0])}], [1, 1], PAIRS)
    assert alone[var].item() == 3.0


@pytest.mark.parametrize("pairs", [[], PAIRS])
def test_a_single_sender_is_copied_exactly_and_not_aliased(pairs):
    sent = {name: torch.tensor([0.1, 0.7]) for name in PAIRS[0]}
    merged = merge_buffers([sent, {name: torch.ones(2) for name in PAIRS[0]}], [0.3, 0], pairs)
    for name, value in sent.items():
        assert torch.equal(merged[name], value)
        assert merged[name].data_ptr() != value.data_ptr()


def test_all_weights_zero_is_refused():
    with pytest.raises(ValueError, match="sum above 0"):
        merge_buffers([{"a": torch.ones(1)}], [0])


def test_running_pairs_need_both_names():
    names = ["x.bn.running_mean", "x.bn.running_var", "y.running_mean", "z.running_var", "w"]
    assert running_pairs(names) == [("x.bn.running_mean", "x.bn.running_var")]
    assert running_pairs(["running_mean", "running_var"]) == [("running_mean", "running_var")]
