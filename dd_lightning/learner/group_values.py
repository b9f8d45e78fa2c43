"""The tensors of a learner that is a group: every rank's copy or shards change with rank 0's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dd_lightning.learner import flat_shards
from dd_lightning.learner.group import Group, Op, Order
from dd_lightning.learner.sharded import gather, is_sharded, reshard, scatter
from dd_lightning.learner.snapshots import ModelValues


class GroupValues(ModelValues):
    """On rank 0 the ledger reads and writes these; the other ranks `follow`.

    After a write all ranks hold the same bits: what rank 0 holds is sent tensor by tensor. A read
    needs the others only for tensors in shards. Buffers are rank 0's.

    Args:
        root: what the strategy has made of the module, which may be wrapped in it.

    Raises:
        ValueError: parameters in shards of a kind that cannot be read.
    """

    def __init__(self, module: nn.Module, group: Group, root: nn.Module | None = None) -> None:
        self._group = group
        self._root = module if root is None else root
        flat_shards.mark(self._root, group)
        super().__init__(module)

    def read(self, fragment: int) -> dict[str, Tensor]:
        """As of one process; on rank 0, in a section."""
        return self._read(fragment, [n for n in self._fragments[fragment] if self._moves(n)])

    def read_whole(self, fragment: int) -> dict[str, Tensor]:
        """As of one process; on rank 0, in a section."""
        return self._read(fragment, list(self._fragments[fragment]))

    def _read(self, fragment: int, names: list[str]) -> dict[str, Tensor]:
        if any(is_sharded(self._tensor(name)) for name in names):
            self._order(Op.READ, fragment, names)
            flat_shards.give_up_whole(self._root)
        return {name: self._copy(name) for name in names}

    @torch.no_grad()
    def write(self, fragment: int, tensors: Mapping[str, Tensor]) -> None:
        """On rank 0, in a section."""
        names = [name for name in self._fragments[fragment] if name in tensors]
        self._order(Op.WRITE, fragment, names)
        reshard(self._root)
        for name in names:
            self._put(name, tensors[name])

    def _order(self, op: Op, fragment: int, names: list[str]) -> None:
        chosen = set(names)
        self._group.order(op, fragment)
        self._group.send_bytes(bytes(name in chosen for name in self._fragments[fragment]))

    @torch.no_grad()
    def follow(self, order: Order) -> None:
        """Take part in a read or write of rank 0."""
        fragment = self._fragments[order.numbers[0]]
        mask = self._group.receive_bytes(len(fragment))
        names = [name for name, chosen in zip(fragment, mask, strict=True) if chosen]
        (reshard if order.op == Op.WRITE else flat_shards.give_up_whole)(self._root)
        for name in names:
            if order.op == Op.WRITE:
                self._put(name, None)
            elif is_sharded(tensor := self._tensor(name)):
                gather(tensor, self._group)

    def _put(self, name: str, value: Tensor | None) -> None:
        tensor = self._tensor(name)
        if is_sharded(tensor):
            scatter(tensor, value, self._group)
            return
        if value is not None:
            tensor.copy_(value)
        self._group.broadcast(tensor)

    def _copy(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        if not is_sharded(tensor):
            return super()._copy(name)
        whole = gather(tensor, self._group)
        assert whole is not None  # this is rank 0
        return whole
