"""Names of tensors, and which are averaged whatever the merge rule is."""

import pytest
import torch
from torch import nn

from dd_lightning.algorithm import average_rule_names, canonical_name

pytestmark = pytest.mark.unit


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(10, 4)
        self.bag = nn.EmbeddingBag(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.decode = nn.Linear(4, 10, bias=False)
        self.lm_head = nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("blocks.0.weight", "blocks.0.weight"),
        ("module.blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.blocks.0.weight", "blocks.0.weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.w", "a.w"),
        ("module._orig_mod.a._checkpoint_wrapped_module.w", "a.w"),
        ("a.module.w", "a.module.w"),
        ("module", "module"),
    ],
)
def test_canonical_name(name, canonical):
    assert canonical_name(name) == canonical


def test_embeddings_and_heads_are_averaged_by_default():
    names = average_rule_names(Model())
    assert names == {"wte.weight", "bag.weight", "lm_head.weight"}
    assert average_rule_names(Model(), None) == {"wte.weight", "bag.weight"}
    assert average_rule_names(Model(), r"^blocks") == {
        "wte.weight",
        "bag.weight",
        "blocks.0.weight",
        "blocks.0.bias",
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whatever_shares_an_embeddings_storage_is_averaged_too(device):
    with torch.device(device):
        model = Model()
        model.decode.weight = model.wte.weight
        # a parameter of its own over the same memory, as after loading with assign=True
        model.blocks[0].weight = nn.Parameter(model.bag.weight.detach()[:4])
    expected = {"wte.weight", "bag.weight", "lm_head.weight", "decode.weight", "blocks.0.weight"}
    assert average_rule_names(model) == expected


def test_neighbours_in_one_flat_storage_are_not_averaged():
    model, flat = Model(), torch.zeros(56)
    model.wte.weight = nn.Parameter(flat[:40].view(10, 4))
    model.blocks[0].weight = nn.Parameter(flat[40:].view(4, 4))
    assert "blocks.0.weight" not in average_rule_names(model)


def test_names_are_canonical_under_a_wrapper():
    wrapped = nn.Module()
    wrapped._orig_mod = Model()
    assert average_rule_names(wrapped) == average_rule_names(Model())


def test_a_pattern_without_effect_warns():
    with pytest.warns(UserWarning, match="'nothing' matches no parameter and has no effect"):
        average_rule_names(Model(), "nothing")


@pytest.mark.parametrize("pattern", ["", "(", 3])
def test_a_broken_pattern_is_refused(pattern):
    with pytest.raises(ValueError, match=r"average_tensors is .*Use null for embeddings only"):
        average_rule_names(Model(), pattern)
