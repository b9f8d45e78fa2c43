"""Merge jobs on the SyncerModule against independent references, without a Trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dd_lightning.algorithm import BFloat16Codec
from tests.syncer_jobs import config_of, contribution, job, layout_of, module_of, values_of

pytestmark = pytest.mark.unit


def local(module, fragment, seed):
    """Values of a learner for one fragment: random, so far from Θ."""
    names = module.merger.theta.layout.fragments[fragment]
    return {name: value for name, value in values_of(seed).items() if name in names}


def theta_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def numpy_rda(vs, ws):
    vs = [v.astype(np.float64) for v in vs]
    norms = [np.linalg.norm(v) for v in vs]
    direction = sum(w * v / n for w, v, n in zip(ws, vs, norms, strict=True)) / sum(ws)
    radius = sum(w * n for w, n in zip(ws, norms, strict=True)) / sum(ws)
    return radius * direction / np.linalg.norm(direction)


def numpy_average(vs, ws):
    return sum(w * v.astype(np.float64) for w, v in zip(ws, vs, strict=True)) / sum(ws)


def test_keys_of_the_state_dict_are_the_canonical_names() -> None:
    module = module_of(config_of())
    assert set(module.state_dict()) == set(values_of(0))
    for name, value in values_of(0).items():
        assert torch.equal(module.state_dict()[name], value)


def test_merges_equal_a_numpy_reference_with_nesterov_momentum() -> None:
    config = config_of(outer={"lr": 0.7, "momentum": 0.9})
    module = module_of(config)
    optimizer = module.configure_optimizers()
    averaged = layout_of(config).averaged
    theta = {n: t.numpy().astype(np.float64) for n, t in values_of(0).items()}
    buffer = {n: np.zeros_like(v) for n, v in theta.items()}
    weights = (3.0, 1.0)
    for version in range(1, 4):
        for fragment in range(2):
            locals_ = [local(module, fragment, 10 * version + i) for i in range(2)]
            held = [
                contribution(str(i), fragment, v, weight=w, base=(1, version - 1))
                for i, (v, w) in enumerate(zip(locals_, weights, strict=True))
            ]
            module.merger.merge(job(fragment, (1, version), *held), optimizer)
            for name in locals_[0]:
                if "running" in name:
                    continue
                vs = [theta[name] - v[name].numpy() for v in locals_]
                small = vs[0].size < 16 or name in averaged
                delta = (numpy_average if small else numpy_rda)(vs, weights)
                buffer[name] = 0.9 * buffer[name] + delta
                theta[name] = theta[name] - 0.7 * (delta + 0.9 * buffer[name])
    for name, tensor in module.theta.named_parameters():
        np.testing.assert_allclose(tensor.detach().numpy(), theta[name], rtol=2e-5, atol=2e-5)


def test_one_contribution_at_lr_one_gives_exactly_the_difference() -> None:
    module = module_of(config_of())
    before = theta_of(module)
    values = local(module, 0, 5)
    module.merger.merge(job(0, (1, 1), contribution("0", 0, values)), module.configure_optimizers())
    for name, tensor in module.theta.named_parameters():
        if name in values:
            assert torch.equal(tensor, before[name] - (before[name] - values[name]))
        else:
            assert torch.equal(tensor, before[name])


def test_bitwise_repeatable_and_digest_is_of_the_bytes() -> None:
    digests = []
    for _ in range(2):
        module = module_of(config_of(outer={"lr": 0.7, "momentum": 0.9}))
        optimizer = module.configure_optimizers()
        held = [contribution(str(i), 1, local(module, 1, i + 3), weight=i + 1) for i in range(3)]
        merged = module.merger.merge(job(1, (1, 1), *held), optimizer)
        digests.append(merged.result.digest)
        sent = merged.published.tensors({t.name: t.shape for t in layout_of(config_of()).tensors})
        for name, value in sent.items():
            assert torch.equal(value, module.state_dict()[name])
    assert digests[0] == digests[1]


def test_another_fragment_keeps_its_parameters_and_momentum() -> None:
    module = module_of(config_of(outer={"lr": 0.7, "momentum": 0.9}))
    optimizer = module.configure_optimizers()
    module.merger.merge(job(0, (1, 1), contribution("0", 0, local(module, 0, 4))), optimizer)
    before = theta_of(module)
    names = set(layout_of(module.config).fragments[0])
    momentum = {
        name: optimizer.state[p]["momentum_buffer"].clone()
        for name, p in module.theta.named_parameters()
        if name in names
    }
    module.merger.merge(job(1, (1, 1), contribution("0", 1, local(module, 1, 4))), optimizer)
    for name, parameter in module.theta.named_parameters():
        if name in names:
            assert torch.equal(parameter, before[name])
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], momentum[name])
        assert parameter.grad is None


def test_any_torch_optimizer_by_target() -> None:
    spec = {"_target_": "torch.optim.Adam", "lr": 0.01}
    module = module_of(config_of(outer=spec))
    optimizer = module.configure_optimizers()
    assert type(optimizer) is torch.optim.Adam
    reference = {n: torch.nn.Parameter(v.clone()) for n, v in values_of(0).items()}
    other = torch.optim.Adam(reference.values(), lr=0.01)
    for version in (1, 2):
        values = local(module, 0, version)
        held = contribution("0", 0, values, base=(1, version - 1))
        module.merger.merge(job(0, (1, version), held), optimizer)
        other.zero_grad()
        for name in values:
            if "running" not in name:
                reference[name].grad = reference[name].detach() - values[name]
        other.step()
    for name, parameter in module.theta.named_parameters():
        assert torch.equal(parameter, reference[name])


def test_a_delta_is_anchored_at_the_base_that_was_kept() -> None:
    module = module_of(config_of(codec="bf16"), keep_versions=lambda: True)
    optimizer = module.configure_optimizers()
    base = theta_of(module)
    module.merger.merge(job(0, (1, 1), contribution("0", 0, local(module, 0, 1))), optimizer)
    current = theta_of(module)
    names = [n for n in layout_of(module.config).fragments[0] if "running" not in n]
    codec = BFloat16Codec()
    deltas = {
        n: codec.decode(codec.encode(base[n] - values_of(2)[n]), base[n].shape) for n in names
    }
    held = contribution("1", 0, deltas, base=(1, 0), kind="delta")
    merged = module.merger.merge(job(0, (1, 2), held), optimizer)
    assert merged.result.staleness == (("1", 1),)
    for name in names:
        expected = current[name] - ((current[name] - base[name]) + deltas[name])
        assert torch.equal(module.state_dict()[name], expected)


def test_a_delta_without_its_base_is_rejected_and_moves_nothing() -> None:
    module = module_of(config_of(codec="bf16"))
    optimizer = module.configure_optimizers()
    before = theta_of(module)
    delta = {n: v for n, v in local(module, 0, 1).items() if "running" not in n}
    held = contribution("1", 0, delta, base=(0, 7), kind="delta")
    merged = module.merger.merge(job(0, (1, 1), held), optimizer)
    assert merged.result.rejected == (("1", "base"),)
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())


def test_an_idle_16_bit_learner_moves_nothing() -> None:
    module = module_of(config_of(), keep_versions=lambda: True)
    before = theta_of(module)
    names = [n for n in layout_of(module.config).fragments[0] if "running" not in n]
    held = contribution("0", 0, {n: before[n].bfloat16() for n in names}, dtype="bfloat16")
    merged = module.merger.merge(job(0, (1, 1), held), module.configure_optimizers())
    assert merged.result.norms == (("0", 0.0),)
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())


@pytest.mark.parametrize("stated", ["float32", "bfloat16", "of another version"])
def test_each_tensor_is_anchored_in_the_dtype_it_came_in(stated) -> None:
    module = module_of(config_of(), keep_versions=lambda: True)
    before = theta_of(module)
    names = [n for n in layout_of(module.config).fragments[0] if "running" not in n]
    half = names[0]  # a model in two dtypes, idle: whatever its join states, nothing moves
    values = {n: before[n].bfloat16() if n == half else before[n].clone() for n in names}
    held = contribution("0", 0, values, dtype=stated)
    merged = module.merger.merge(job(0, (1, 1), held), module.configure_optimizers())
    assert merged.result.rejected == () and merged.result.norms == (("0", 0.0),)
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())


def test_reanchor_takes_the_weighted_average_and_zeroes_momentum() -> None:
    module = module_of(config_of(outer={"lr": 0.7, "momentum": 0.9}))
    optimizer = module.configure_optimizers()
    for fragment in range(2):
        held = contribution("0", fragment, local(module, fragment, 4))
        module.merger.merge(job(fragment, (1, 1), held), optimizer)
    a, b = local(module, 0, 8), local(module, 0, 9)
    held = [contribution("0", 0, a, weight=1.0), contribution("1", 0, b, weight=3.0)]
    merged = module.merger.merge(job(0, (2, 2), *held, reanchor=True), optimizer)
    assert merged.result.agreement is None and merged.result.outer_norm == 0.0
    for name, parameter in module.theta.named_parameters():
        if name in a:
            expected = (a[name].double() + 3 * b[name].double()) / 4
            assert torch.equal(parameter, expected.float())
            assert parameter not in optimizer.state
        else:
            assert "momentum_buffer" in optimizer.state[parameter]
    before = theta_of(module)
    values = local(module, 0, 11)
    module.merger.merge(job(0, (2, 3), contribution("0", 0, values, base=(2, 2))), optimizer)
    for name in set(values) & {n for n, _ in module.theta.named_parameters()}:
        delta = before[name] - values[name]
        torch.testing.assert_close(module.state_dict()[name], before[name] - 0.7 * 1.9 * delta)


def test_the_guard_rejects_an_outlier_of_three_and_not_of_two() -> None:
    for others, rejected in ((2, (("9", "norm"),)), (1, ())):
        module = module_of(config_of(max_norm_ratio=3.0))
        before = theta_of(module)
        names = layout_of(module.config).fragments[0]
        near = [{n: before[n] + 0.01 * (i + 1) for n in names} for i in range(others)]
        far = {n: before[n] + 1.0 for n in names}
        held = [contribution(str(i), 0, values) for i, values in enumerate(near)]
        held.append(contribution("9", 0, far))
        merged = module.merger.merge(job(0, (1, 1), *held), module.configure_optimizers())
        assert merged.result.rejected == rejected


def test_weightless_contributions_move_nothing_but_count_as_a_version() -> None:
    module = module_of(config_of())
    before = theta_of(module)
    held = contribution("0", 0, local(module, 0, 3), weight=0.0)
    merged = module.merger.merge(job(0, (1, 1), held), module.configure_optimizers())
    assert module.merger.version(0) == (1, 1)
    assert merged.result.agreement is None
    assert all(torch.equal(v, before[n]) for n, v in module.state_dict().items())


def test_buffers_are_mixed_outside_norm_and_optimizer() -> None:
    module = module_of(config_of())
    fragment = next(
        i for i, f in enumerate(layout_of(module.config).fragments) if "norm.running_var" in f
    )
    a, b = local(module, fragment, 3), local(module, fragment, 4)
    held = [contribution("0", fragment, a, weight=1.0), contribution("1", fragment, b, weight=3.0)]
    merged = module.merger.merge(job(fragment, (1, 1), *held), module.configure_optimizers())
    mean = (a["norm.running_mean"] + 3 * b["norm.running_mean"]) / 4
    square = sum(
        w * (v["norm.running_var"] + v["norm.running_mean"] ** 2) for w, v in ((0.25, a), (0.75, b))
    )
    state = module.state_dict()
    torch.testing.assert_close(state["norm.running_mean"], mean)
    torch.testing.assert_close(state["norm.running_var"], square - mean**2)
    names = [n for n in a if "running" not in n]
    norm = sum(((values_of(0)[n] - a[n]).double() ** 2).sum() for n in names).sqrt()
    assert dict(merged.result.norms)["0"] == pytest.approx(float(norm), rel=1e-6)


def test_versions_are_kept_only_when_someone_needs_them() -> None:
    for keep, most in ((False, 1), (True, 4)):
        module = module_of(config_of(), keep_versions=lambda keep=keep: keep)
        optimizer = module.configure_optimizers()
        for version in range(1, 7):
            held = contribution("0", 0, local(module, 0, version), base=(1, version - 1))
            module.merger.merge(job(0, (1, version), held), optimizer)
        assert len(module.merger._versions[0]) == most
