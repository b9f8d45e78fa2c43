"""Θ as a tree of parameters and buffers under the learners' own (canonical, dotted) names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dd_lightning.protocol.layout import Layout


class Theta:
    """Float32 masters on the CPU; keys of `root.state_dict()` are exactly the canonical names.

    `root` holds nothing of ours, so no name of a learner's module can collide with one.
    """

    def __init__(self, layout: Layout, values: Mapping[str, Tensor]) -> None:
        self.layout = layout
        self.root = nn.Module()
        self._nodes: dict[str, nn.Module] = {"": self.root}
        self.by_name: dict[str, Tensor] = {}
        """Parameters and buffers by canonical name."""
        in_fragments = {name for names in layout.fragments for name in names}
        for info in sorted(layout.tensors, key=lambda tensor: tensor.name):
            if info.name in in_fragments:
                value = values[info.name].detach().to("cpu", torch.float32, copy=True)
                self._place(info.name, value.view(info.shape), info.kind == "buffer")

    def fragment(self, index: int) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Parameters and buffers of a fragment by name."""
        tensors = {name: self.by_name[name] for name in self.layout.fragments[index]}
        parameters = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter)}
        return parameters, {n: t for n, t in tensors.items() if n not in parameters}

    def _place(self, name: str, value: Tensor, is_buffer: bool) -> None:
        path, _, leaf = name.rpartition(".")
        node = self._node(path)
        if is_buffer:
            node.register_buffer(leaf, value)
            self.by_name[name] = value
        else:
            parameter = nn.Parameter(value)
            node.register_parameter(leaf, parameter)
            self.by_name[name] = parameter

    def _node(self, path: str) -> nn.Module:
        if path not in self._nodes:
            parent, _, name = path.rpartition(".")
            child = nn.Module()
            # assignment, not add_module: a learner's submodule may be called `half` or `type`
            setattr(self._node(parent), name, child)
            self._nodes[path] = child
        return self._nodes[path]
