"""The four fragmentations on small layouts, and their refusals."""

import pytest

from dd_lightning.algorithm import (
    FRAGMENTERS,
    balanced_fragments,
    check_partition,
    layer_fragments,
    strided_fragments,
    tensor_fragments,
)

pytestmark = pytest.mark.unit

GPT = {
    "wte.weight": 50,
    **{f"blocks.{i}.{name}": size for i in range(4) for name, size in (("qkv", 9), ("fc", 12))},
    "norm.weight": 3,
    "norm.bias": 3,
}


def test_balanced_places_the_largest_first_into_the_lightest():
    sizes = {"c": 4, "a": 4, "b": 7, "d": 3, "e": 1}
    # b to 0, a to 1, c to 1 (4 < 7), d to 0 (7 < 8), e to 1 (8 < 10)
    assert balanced_fragments(sizes, 2) == [["b", "d"], ["a", "c", "e"]]
    # equal sizes go by name, equal loads to the lowest index
    assert balanced_fragments({"z": 1, "y": 1, "x": 1}, 2) == [["x", "z"], ["y"]]


def test_balanced_does_not_depend_on_the_order_of_names():
    assert balanced_fragments(dict(sorted(GPT.items())), 3) == balanced_fragments(GPT, 3)


def test_balanced_fills_every_fragment_even_with_tensors_without_elements():
    assert balanced_fragments({"a": 5, "b": 0, "c": 0}, 3) == [["a"], ["b"], ["c"]]


def test_layer_cuts_contiguous_blocks():
    assert layer_fragments(GPT, 3) == [
        ["wte.weight", "blocks.0.qkv", "blocks.0.fc"],
        ["blocks.1.qkv", "blocks.1.fc", "blocks.2.qkv", "blocks.2.fc"],
        ["blocks.3.qkv", "blocks.3.fc", "norm.weight", "norm.bias"],
    ]


def test_strided_deals_layers_round():
    assert strided_fragments(GPT, 3) == [
        ["wte.weight", "blocks.2.qkv", "blocks.2.fc"],
        ["blocks.0.qkv", "blocks.0.fc", "blocks.3.qkv", "blocks.3.fc"],
        ["blocks.1.qkv", "blocks.1.fc", "norm.weight", "norm.bias"],
    ]


def test_layers_of_two_towers_are_different_layers():
    sizes = {"text.layers.0.w": 1, "image.layers.0.w": 1, "scale": 1, "bias": 1}
    assert strided_fragments(sizes, 4) == [[name] for name in sizes]


def test_tensor_cuts_names_into_equal_runs():
    sizes = {name: 1 for name in "gbdface"}
    assert tensor_fragments(sizes, 3) == [["a", "b", "c"], ["d", "e"], ["f", "g"]]


@pytest.mark.parametrize("strategy", FRAGMENTERS)
def test_more_fragments_than_units_are_lowered_with_a_warning(strategy):
    sizes = {"a.weight": 3, "b.weight": 2}
    with pytest.warns(UserWarning, match="fragments is 5 .* only 2 .*algorithm.fragments=2"):
        parts = FRAGMENTERS[strategy]()(sizes, 5)
    assert parts == [["a.weight"], ["b.weight"]]


@pytest.mark.parametrize("strategy", FRAGMENTERS)
@pytest.mark.parametrize("fragments", [0, -1, 1.5, True, "2"])
def test_a_broken_number_of_fragments_is_refused(strategy, fragments):
    with pytest.raises(ValueError, match=r"^fragments is .*an integer from 1.*Use 1"):
        FRAGMENTERS[strategy]()({"a": 1}, fragments)


@pytest.mark.parametrize("strategy", FRAGMENTERS)
def test_broken_sizes_are_refused(strategy):
    with pytest.raises(ValueError, match="no trainable tensors"):
        FRAGMENTERS[strategy]()({}, 1)
    with pytest.raises(ValueError, match=r"^size of b is -1"):
        FRAGMENTERS[strategy]()({"a": 1, "b": -1}, 1)


def test_check_partition_names_what_is_wrong():
    sizes = {"a": 1, "b": 1, "c": 1}
    check_partition([["a", "c"], ["b"]], sizes, "mine")
    for parts, message in (
        ([["a"], ["b"]], r"missing tensors \['c'\]"),
        ([["a", "b"], ["b", "c"]], r"placed twice \['b'\]"),
        ([["a", "b", "c", "x"]], r"unknown \['x'\]"),
        ([["a", "b", "c"], []], r"^mine gave no partition: empty fragments \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_partition(parts, sizes, "mine")
