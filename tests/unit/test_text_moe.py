"""Mixture of experts: routing, balance loss and usage beside plain loops; a Trainer's logs."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from dd_lightning.tasks.text import GPT, GPTConfig, GPTModule, MoEConfig, MoEModule
from dd_lightning.tasks.text.moe import MoEMLP, Routing, balance_loss, route
from dd_lightning.tasks.text.moe_module import counts_of, expert_shares
from tests.trainers import QUIET

pytestmark = pytest.mark.unit

TINY = {"vocabulary": 32, "max_length": 16, "width": 16, "depth": 2, "heads": 2}


def layer(seed: int = 0, **config) -> MoEMLP:
    torch.manual_seed(seed)
    return MoEMLP(GPTConfig(**TINY), MoEConfig(**config))


def tokens(seed: int = 1, batch: int = 3, length: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(seed))


def batches(count: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    """Counting sequences."""
    starts = torch.arange(start, start + count * 4).view(count, 4, 1)
    ids = (starts * 5 + torch.arange(17)) % 32
    return [{"input_ids": x[:, :-1], "labels": x[:, 1:]} for x in ids]


def module(seed: int = 0, **moe) -> MoEModule:
    torch.manual_seed(seed)
    return MoEModule(TINY, moe, {"lr": 1e-2, "warmup_steps": 5})


def reference(moe: MoEMLP, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    out = torch.zeros_like(x)
    for place in itertools.product(*map(range, x.shape[:-1])):
        probabilities = (moe.router.weight @ x[place]).softmax(0).tolist()
        ranked = sorted(range(len(probabilities)), key=lambda e: -probabilities[e])[: moe.top_k]
        total = sum(probabilities[e] for e in ranked)
        for e in ranked:
            up, gelu, down = moe.experts[e]
            hidden = gelu(up.weight @ x[place])
            out[place] += probabilities[e] / total * (down.weight @ hidden)
    return out


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (4, 1), (3, 3), (8, 2)])
def test_the_layer_equals_a_loop_over_tokens_and_experts(experts, top_k):
    moe, x = layer(experts=experts, top_k=top_k), tokens()
    torch.testing.assert_close(moe(x), reference(moe, x), rtol=1e-4, atol=1e-5)


def test_gradients_equal_those_of_the_loop():
    moe, x = layer(), tokens()
    moe(x).square().sum().backward()
    ours = [p.grad.clone() for p in moe.parameters()]
    moe.zero_grad()
    reference(moe, x).square().sum().backward()
    # the loop's weights are numbers, so its router learns nothing: the experts are compared
    theirs = [torch.zeros_like(p) if p.grad is None else p.grad for p in moe.parameters()]
    for name, a, b in zip(dict(moe.named_parameters()), ours, theirs, strict=True):
        if name.startswith("router"):
            assert a.abs().max() > 0
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    moe, x = layer(experts=4, top_k=1), tokens(batch=1, length=1)
    moe(x).sum().backward()
    used = moe.take_routing().counts().bool().tolist()
    assert used.count(True) == 1
    for expert, is_used in zip(moe.experts, used, strict=True):
        assert all((p.grad.abs().max() > 0) == is_used for p in expert.parameters())


def test_what_one_token_gets_does_not_depend_on_the_others():
    moe, x = layer(), tokens()
    torch.testing.assert_close(moe(x)[1:2, 2:3], moe(x[1:2, 2:3]), rtol=1e-4, atol=1e-6)


def test_balance_loss_is_its_formula_and_1_when_even_and_e_when_collapsed():
    routing = route(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), 2)
    shares, means = [0.0] * 4, [0.0] * 4
    for chosen, probability in zip(routing.chosen_TK, routing.probability_TE, strict=True):
        for e in chosen.tolist():
            shares[e] += 1 / (40 * 2)
        for e in range(4):
            means[e] += probability[e].item() / 40
    expected = 4 * sum(f * p for f, p in zip(shares, means, strict=True))
    assert balance_loss(routing).item() == pytest.approx(expected, rel=1e-5)

    even = Routing(torch.full((4, 4), 0.25), torch.arange(4)[:, None], torch.ones(4, 1))
    assert balance_loss(even).item() == pytest.approx(1)
    first = torch.tensor([1.0, 0, 0, 0]).expand(4, 4)
    collapsed = Routing(first, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
    assert balance_loss(collapsed).item() == pytest.approx(4)


def test_balance_loss_spreads_the_load():
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor(
        [3.0, 0, 0, 0]
    )
    bias = torch.zeros(4, requires_grad=True)
    before = route(logits, 1).counts().max()
    for _ in range(200):
        (gradient,) = torch.autograd.grad(balance_loss(route(logits + bias, 1)), bias)
        bias = (bias - 0.2 * gradient).detach().requires_grad_()
    assert before > 50 > 25 > route(logits + bias, 1).counts().max()


def test_shares_are_each_blocks_counts_over_their_sum():
    chosen = [torch.tensor([[0, 1], [0, 2]]), torch.tensor([[2, 1], [1, 2]])]
    routings = [Routing(torch.zeros(2, 3), c, torch.zeros(2, 2)) for c in chosen]
    counts = counts_of(routings)
    assert counts.tolist() == [[2, 1, 1], [0, 2, 2]]
    assert expert_shares(counts).tolist() == [[0.5, 0.25, 0.25], [0, 0.5, 0.5]]


def test_dense_and_moe_have_the_same_shapes_and_cost_a_token():
    ids = batches(1)[0]["input_ids"]
    torch.manual_seed(0)
    dense, sparse = GPT(GPTConfig(**TINY)), module().model
    assert dense(ids).shape == sparse(ids).shape == (4, 16, 32)
    mlp = sum(p.numel() for p in dense.blocks[0].mlp.parameters())
    expert = sum(p.numel() for p in sparse.blocks[0].mlp.experts[0].parameters())
    assert 2 * expert == mlp  # top_k 2
    mlps = [m.blocks[0].mlp for m in (dense, sparse)]
    # both start with outputs scaled for the residual stream
    assert mlps[1].experts[0][2].weight.std().item() == pytest.approx(
        mlps[0][2].weight.std().item() * 2**0.5, rel=0.1
    )


def test_training_adds_the_balance_and_validation_does_not():
    ours, batch = module(balance=0.5), batches(1)[0]
    ours.log = ours.log_dict = lambda *args, **named: None
    plain = GPTModule.loss(ours, batch)
    balance = torch.stack([balance_loss(r) for r in ours._take_routings()]).mean()
    torch.testing.assert_close(ours.training_step(batch, 0), plain + 0.5 * balance)


def test_a_fit_learns_and_its_validation_reports_how_experts_are_used():
    ours = module()
    held_out = DataLoader(batches(3, start=900), batch_size=None)
    trainer = pl.Trainer(**QUIET, max_steps=40, limit_val_batches=3)
    before = trainer.validate(ours, held_out, verbose=False)[0]
    trainer.fit(ours, DataLoader(batches(40), batch_size=None), held_out)
    assert {"train_loss", "train_balance", "train_expert_share_min"} <= set(trainer.logged_metrics)
    after = trainer.validate(ours, held_out, verbose=False)[0]
    assert after["val_loss"] < 0.6 * before["val_loss"]
    counts = torch.zeros(2, 4, dtype=torch.long)
    for batch in held_out:
        ours.loss(batch)
        counts += counts_of(ours._take_routings())
    shares = expert_shares(counts)
    assert counts.sum().item() == 2 * 2 * 3 * 4 * 16  # blocks, top_k, tokens
    assert after["expert_share_min"] == pytest.approx(shares.min().item())
    assert after["expert_share_max"] == pytest.approx(shares.max().item())
    assert after["expert_share_b1_e3"] == pytest.approx(shares[1, 3].item())


def test_a_checkpoint_loads_without_unpickling(tmp_path):
    ours = module(experts=3)
    trainer = pl.Trainer(**QUIET, max_steps=1)
    data = DataLoader(batches(2), batch_size=None)
    trainer.fit(ours, data, data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = MoEModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    batch = batches(1)[0]
    assert torch.equal(loaded.loss(batch), ours.loss(batch))


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"experts": 1}, "moe.experts is 1.*task=text"),
        ({"top_k": 5}, r"moe.top_k is 5, allowed are 1..moe.experts = 1..4"),
        ({"top_k": 0}, "moe.top_k is 0"),
        ({"expansion": 1.5}, "moe.expansion is 1.5"),
        ({"balance": -1}, "moe.balance is -1"),
        ({"expert": 4}, "moe has no field expert; allowed are"),
    ],
)
def test_wrong_settings_are_refused(moe, message):
    with pytest.raises(ValueError, match=message):
        MoEModule(TINY, moe)
