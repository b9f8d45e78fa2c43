"""The layout: which tensor is in which fragment, which rule merges it, and its fingerprint.

Computed by the syncer from the first learner's tensors and the run's configuration; every other
learner must bring the same tensors, or is refused with the first difference named.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dd_lightning.algorithm import FRAGMENTERS, resolve
from dd_lightning.protocol.config import AlgorithmConfig
from dd_lightning.protocol.messages import TensorInfo


@dataclass(frozen=True, slots=True)
class Layout:
    """`fragments[p]`: names of its parameters in name order, then of its buffers in name order."""

    tensors: tuple[TensorInfo, ...]
    fragments: tuple[tuple[str, ...], ...]
    averaged: frozenset[str]
    fingerprint: str

    @property
    def num_fragments(self) -> int:
        """P, which may be lower than asked for when there are fewer tensors."""
        return len(self.fragments)

    def elements(self) -> tuple[int, ...]:
        """Trainable elements per fragment (buffers not counted)."""
        sizes = {t.name: math.prod(t.shape) for t in self.tensors if t.kind != "buffer"}
        return tuple(sum(sizes.get(name, 0) for name in names) for names in self.fragments)

    def difference(self, tensors: Sequence[TensorInfo]) -> str | None:
        """The first difference between these tensors and ours, in words; None when equal."""
        ours = {tensor.name: tensor for tensor in self.tensors}
        theirs = {tensor.name: tensor for tensor in tensors}
        for name in sorted({*ours, *theirs}):
            if name not in theirs:
                return f"it lacks {name} {list(ours[name].shape)}"
            if name not in ours:
                return f"it has {name} {list(theirs[name].shape)}, which the run's model lacks"
            if ours[name] != theirs[name]:
                mine, its = ours[name], theirs[name]
                return (
                    f"its {name} is {its.kind} {list(its.shape)}, "
                    f"the run's is {mine.kind} {list(mine.shape)}"
                )
        return None


def build_layout(tensors: Sequence[TensorInfo], algorithm: AlgorithmConfig) -> Layout:
    """Fragments of `algorithm.fragmentation`, averaged names, and the fingerprint.

    `tensors` come in module order, which the `layer` and `strided` fragmentations read.

    Raises:
        ValueError: no trainable tensor, or a name twice.
    """
    sizes = {t.name: math.prod(t.shape) for t in tensors if t.kind != "buffer"}
    if not sizes:
        raise ValueError("the model has no trainable tensor; unfreeze what is to be trained")
    if len({t.name for t in tensors}) != len(tensors):
        raise ValueError("two tensors of the model have one canonical name")
    fragmenter = resolve("algorithm.fragmentation", algorithm.fragmentation, FRAGMENTERS)
    fragments = [sorted(names) for names in fragmenter(sizes, algorithm.fragments)]
    place = {name: index for index, names in enumerate(fragments) for name in names}
    for tensor in sorted(tensors, key=lambda t: t.name):
        if tensor.kind == "buffer" and algorithm.buffers:
            fragments[place.get(tensor.module, 0)].append(tensor.name)
    pattern = re.compile(algorithm.average_tensors)
    averaged = frozenset(
        t.name
        for t in tensors
        if t.kind == "embedding" or (t.kind != "buffer" and pattern.search(t.name))
    )
    rules = {name: "average" for name in averaged}
    rows = [
        (
            t.name,
            list(t.shape),
            "buffer" if t.kind == "buffer" else rules.get(t.name, "rule"),
            index,
        )
        for index, names in enumerate(fragments)
        for t in sorted((t for t in tensors if t.name in set(names)), key=lambda t: t.name)
    ]
    digest = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()[:16]
    return Layout(tuple(tensors), tuple(tuple(names) for names in fragments), averaged, digest)
