"""Fragmentations over random layouts: partitions, and the greedy rule against a second author."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dd_lightning.algorithm import FRAGMENTERS, balanced_fragments, check_partition

pytestmark = pytest.mark.property
LIMITED = settings(max_examples=80, deadline=None)

names = st.builds(
    lambda tower, layer, leaf: ".".join(part for part in (tower, layer, leaf) if part),
    st.sampled_from(["", "blocks", "text.layers", "image.layers"]),
    st.sampled_from(["", "0", "1", "2", "10"]),
    st.sampled_from(["w", "b", "norm.weight", "scale"]),
)
layouts = st.dictionaries(names, st.integers(1, 40), min_size=1, max_size=30)


def reference_loads(sizes, fragments):
    """Total of each fragment by the specification's rule, written as a scan over a sorted list."""
    todo = sorted(sizes.items(), key=lambda item: item[0])
    todo.sort(key=lambda item: item[1], reverse=True)  # stable: ties stay in name order
    loads, placed = [0] * fragments, {}
    for name, size in todo:
        target = loads.index(min(loads))
        loads[target] += size
        placed[name] = target
    return loads, placed


@LIMITED
@given(layouts, st.integers(1, 30))
def test_balanced_equals_the_specification(sizes, fragments):
    fragments = min(fragments, len(sizes))
    parts = balanced_fragments(sizes, fragments)
    loads, placed = reference_loads(sizes, fragments)
    assert [sum(sizes[name] for name in part) for part in parts] == loads
    assert {name: index for index, part in enumerate(parts) for name in part} == placed


@LIMITED
@given(layouts, st.integers(1, 30))
def test_balanced_loads_differ_by_at_most_the_largest_tensor(sizes, fragments):
    parts = balanced_fragments(sizes, min(fragments, len(sizes)))
    loads = [sum(sizes[name] for name in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize("strategy", FRAGMENTERS)
@LIMITED
@given(sizes=layouts, fragments=st.integers(1, 40))
def test_every_tensor_is_in_exactly_one_of_the_nonempty_fragments(strategy, sizes, fragments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = FRAGMENTERS[strategy]()(sizes, fragments)
    check_partition(parts, sizes, strategy)
    assert len(parts) <= fragments
    assert bool(caught) == (len(parts) < fragments)


@pytest.mark.parametrize("strategy", ["layer", "strided"])
@LIMITED
@given(sizes=layouts)
def test_a_layer_is_never_split(strategy, sizes):
    def layer(name):
        parts = name.split(".")
        digits = [i for i, part in enumerate(parts) if part.isdigit()]
        return parts[: digits[0] + 1] if digits else (parts[:-1] or [name])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = FRAGMENTERS[strategy]()(sizes, 5)
    homes = {}
    for index, part in enumerate(parts):
        for name in part:
            homes.setdefault(tuple(layer(name)), set()).add(index)
    assert all(len(home) == 1 for home in homes.values())


@LIMITED
@given(sizes=layouts, fragments=st.integers(1, 30))
def test_tensor_runs_are_cuts_of_the_name_order(sizes, fragments):
    parts = FRAGMENTERS["tensor"]()(sizes, min(fragments, len(sizes)))
    assert [name for part in parts for name in part] == sorted(sizes)
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
