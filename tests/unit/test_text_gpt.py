"""The GPT: rotary positions, causality, tied embeddings, refusals, an independent reference."""

import math

import pytest
import torch
import torch.nn.functional as F

from dd_lightning.tasks.text import GPT, GPTConfig
from dd_lightning.tasks.text.gpt import apply_rope, rope_tables

pytestmark = pytest.mark.unit

TINY = {"vocabulary": 32, "max_length": 12, "width": 16, "depth": 2, "heads": 2}


def make(seed: int = 0, **changes) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**TINY, **changes}))


def ids(seed: int = 1, batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_rope_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    cos, sin = (table.double() for table in rope_tables(20, 8))

    def score(m: int, n: int) -> float:
        q = apply_rope(query[None], cos[m : m + 1], sin[m : m + 1])
        k = apply_rope(key[None], cos[n : n + 1], sin[n : n + 1])
        return float((q * k).sum())

    assert score(3, 1) == pytest.approx(score(14, 12), abs=1e-5)
    assert score(5, 5) == pytest.approx(float(query @ key), abs=1e-5)
    assert abs(score(3, 1) - score(6, 1)) > 1e-3


def test_rope_is_multiplication_by_complex_phases():
    x = torch.randn(1, 1, 7, 8, generator=torch.Generator().manual_seed(0))
    angle = torch.outer(torch.arange(7.0), 10000 ** (-torch.arange(4.0) / 4))
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    rotated = apply_rope(x, *rope_tables(7, 8))
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), -1))


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_later_tokens_do_not_change_earlier_logits(positions):
    model, first = make(positions=positions), ids()
    second = first.clone()
    second[:, 7:] = (second[:, 7:] + 1) % 32
    a, b = model(first), model(second)
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=0, atol=1e-6)
    assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-3


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_order_of_earlier_tokens_matters(positions):
    model, first = make(positions=positions, depth=1), ids(batch=1)
    first[0, :2] = torch.tensor([3, 4])
    swapped = first.clone()
    swapped[0, :2] = torch.tensor([4, 3])
    assert (model(first)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-6


def test_learned_positions_equal_a_reference_written_with_explicit_softmax():
    model, x_ids = make(positions="learned"), ids()
    x = model.embedding.weight[x_ids] + model.position.weight
    mask = torch.full((12, 12), -math.inf).triu(1)
    for block in model.blocks:
        h = F.layer_norm(x, (16,), block.norm_attention.weight, block.norm_attention.bias)
        q, k, v = (h @ block.attention.query_key_value.weight.T).split(16, -1)
        heads = []
        for part in (slice(0, 8), slice(8, 16)):
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(8) + mask
            heads.append(scores.softmax(-1) @ v[..., part])
        x = x + torch.cat(heads, -1) @ block.attention.output.weight.T
        h = F.layer_norm(x, (16,), block.norm_mlp.weight, block.norm_mlp.bias)
        x = x + F.gelu(h @ block.mlp[0].weight.T) @ block.mlp[2].weight.T
    expected = F.layer_norm(x, (16,), model.norm.weight, model.norm.bias) @ model.head.weight.T
    torch.testing.assert_close(model(x_ids), expected, rtol=1e-4, atol=1e-5)


def test_tied_embeddings_share_storage_and_count_once():
    tied, untied = make(), make(tie_embeddings=False)
    assert tied.head.weight.data_ptr() == tied.embedding.weight.data_ptr()
    assert untied.head.weight.data_ptr() != untied.embedding.weight.data_ptr()
    sizes = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert sizes[1] - sizes[0] == 32 * 16


def test_rope_tables_are_not_in_the_state_dict():
    assert not [name for name in make().state_dict() if "rope" in name]


def test_same_seed_same_weights_and_logits():
    a, b = make(seed=5), make(seed=5)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(a(ids()), b(ids()))


def test_dropout_draws_only_in_training():
    model = make(dropout=0.5)
    assert not torch.equal(model(ids()), model(ids()))
    model.eval()
    assert torch.equal(model(ids()), model(ids()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 15}, "not a multiple of gpt.heads 2.*width=16"),
        ({"heads": 0}, "gpt.heads is 0"),
        ({"depth": 1.5}, "gpt.depth is 1.5"),
        ({"positions": "alibi"}, "'alibi', allowed are"),
        ({"width": 6, "heads": 2}, "rotates pairs.*has 3"),
        ({"dropout": 1.0}, "gpt.dropout is 1.0"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**TINY, **changes})


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match=r"13 tokens.*max_length 12"):
        make()(ids(length=13))
