"""Which fragment each trainable tensor belongs to.

Every strategy takes sizes (elements by name, names in module order) and a number of fragments P,
and returns P non-empty lists of names in which every tensor is once. P is lowered, with a warning,
where there are fewer units (tensors or layers) than fragments.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dd_lightning.algorithm.checks import check_int


@runtime_checkable
class Fragmenter(Protocol):
    """A strategy; the `_target_` of `algorithm.fragmentation` is a class of such objects."""

    def __call__(self, sizes: dict[str, int], fragments: int) -> list[list[str]]:
        """Partition the names of `sizes` into at most `fragments` non-empty lists."""
        ...


def balanced_fragments(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Greedy bin-packing: descending size (ties: name), each into the smallest fragment so far.

    Ties between fragments go to the lowest index. Names of a fragment are in that order.

    Args:
        sizes: number of elements by tensor name; tied tensors once.
        fragments: P; lowered with a warning where there are fewer tensors.

    Raises:
        ValueError: no tensors, a negative size, or fewer than 1 fragment.
    """
    count = _fragment_count(sizes, fragments, len(sizes), "trainable tensors")
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        # an empty fragment before one that holds only tensors without elements
        target = min(range(count), key=lambda index: (loads[index], bool(parts[index]), index))
        parts[target].append(name)
        loads[target] += sizes[name]
    return parts


def layer_fragments(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Contiguous blocks of layers; the blocks' numbers of layers differ by at most 1.

    A layer is everything up to the first integer in the dotted name (`blocks.3`); tensors without
    one form layers by module (`embed`, `norm`), in the order in which they come.

    Raises:
        ValueError: as `balanced_fragments`.
    """
    layers = _layers(sizes)
    count = _fragment_count(sizes, fragments, len(layers), "layers")
    parts: list[list[str]] = [[] for _ in range(count)]
    for index, names in enumerate(layers):
        parts[index * count // len(layers)].extend(names)
    return parts


def strided_fragments(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Layer i (as in `layer_fragments`) goes to fragment i mod P.

    Raises:
        ValueError: as `balanced_fragments`.
    """
    layers = _layers(sizes)
    count = _fragment_count(sizes, fragments, len(layers), "layers")
    parts: list[list[str]] = [[] for _ in range(count)]
    for index, names in enumerate(layers):
        parts[index % count].extend(names)
    return parts


def tensor_fragments(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Tensors in name order, cut into P runs whose counts differ by at most 1.

    Raises:
        ValueError: as `balanced_fragments`.
    """
    count = _fragment_count(sizes, fragments, len(sizes), "trainable tensors")
    parts: list[list[str]] = [[] for _ in range(count)]
    for index, name in enumerate(sorted(sizes)):
        parts[index * count // len(sizes)].append(name)
    return parts


@dataclass(frozen=True, slots=True)
class Balanced:
    """Fragmentation `balanced`, see `balanced_fragments`."""

    def __call__(self, sizes: dict[str, int], fragments: int) -> list[list[str]]:
        return balanced_fragments(sizes, fragments)


@dataclass(frozen=True, slots=True)
class Layer:
    """Fragmentation `layer`, see `layer_fragments`."""

    def __call__(self, sizes: dict[str, int], fragments: int) -> list[list[str]]:
        return layer_fragments(sizes, fragments)


@dataclass(frozen=True, slots=True)
class Strided:
    """Fragmentation `strided`, see `strided_fragments`."""

    def __call__(self, sizes: dict[str, int], fragments: int) -> list[list[str]]:
        return strided_fragments(sizes, fragments)


@dataclass(frozen=True, slots=True)
class TensorRuns:
    """Fragmentation `tensor`, see `tensor_fragments`."""

    def __call__(self, sizes: dict[str, int], fragments: int) -> list[list[str]]:
        return tensor_fragments(sizes, fragments)


FRAGMENTERS: dict[str, type] = {
    "balanced": Balanced,
    "layer": Layer,
    "strided": Strided,
    "tensor": TensorRuns,
}


def check_partition(parts: list[list[str]], sizes: Mapping[str, int], source: str) -> None:
    """Refuse a fragmentation (of a user's own class) that is no partition of the tensors.

    Args:
        source: who made it, for the message.

    Raises:
        ValueError: a fragment is empty, or a tensor is missing, unknown or in two places.
    """
    placed = sorted(name for part in parts for name in part)
    empty = [index for index, part in enumerate(parts) if not part]
    if empty or placed != sorted(sizes):
        twice = sorted({name for name in placed if placed.count(name) > 1})
        missing, unknown = sorted(set(sizes) - set(placed)), sorted(set(placed) - set(sizes))
        raise ValueError(
            f"{source} gave no partition: empty fragments {empty}, missing tensors {missing}, "
            f"unknown {unknown}, placed twice {twice}. Put every tensor into exactly one fragment."
        )


def _fragment_count(sizes: Mapping[str, int], fragments: int, units: int, what: str) -> int:
    """Validate the arguments and return P, lowered to the number of units where that is less."""
    check_int("fragments", fragments, 1, fix="Use 1 to merge the whole model at once.")
    if not sizes:
        raise ValueError("no trainable tensors to cut into fragments; unfreeze some parameters.")
    for name, size in sizes.items():
        check_int(f"size of {name}", size, 0)
    if fragments > units:
        warnings.warn(
            f"fragments is {fragments} but there are only {units} {what}: lowered to {units}. "
            f"Set algorithm.fragments={units} or fewer.",
            stacklevel=3,
        )
    return min(fragments, units)


def _layers(names: Mapping[str, int]) -> list[list[str]]:
    """Group names by layer, layers in order of first appearance."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(_layer_of(name), []).append(name)
    return list(layers.values())


def _layer_of(name: str) -> str:
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1]) or name
