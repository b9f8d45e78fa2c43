"""The inner optimizers' state of a learner that is a group: rank 0 sends and receives it, entry by
entry, so that no rank ever holds more than one of them in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dd_lightning.learner.group import Group, Op, Order
from dd_lightning.learner.inner_state import InnerState, dtype_of, finite_tensor, raw_bytes
from dd_lightning.learner.sharded import (
    divides_evenly,
    full_shape,
    gather_kept,
    is_sharded,
    scatter_kept,
)
from dd_lightning.learner.state_copy import BackgroundCopy, StateCopies
from dd_lightning.protocol.transfer import Entry, TransferError


class Act(IntEnum):
    """What rank 0 orders with `Op.INNER`."""

    BEGIN = 0  # forget what has been staged
    STAGE = 1  # an entry of a peer's state: bytes of its description, which follow
    COMMIT = 2  # what was staged becomes the state
    COPY = 3  # copy this rank's slices; what there is, is told to rank 0
    GIVE = 4  # hand an entry of the copy to rank 0: bytes of its description, rank that has it
    FORGET = 5  # the copy


class GroupInnerState(InnerState):
    """On rank 0 its methods are called in sections of the group; the other ranks `follow`."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], group: Group) -> None:
        super().__init__(module, optimizers)
        self._group = group
        self._staged: dict[Entry, Tensor] = {}
        self._copy: BackgroundCopy | None = None
        self._names: dict[Entry, str] = {}  # of what is copied
        self._owners: dict[Entry, int] = {}  # the first rank that has it
        sharded = [p for p, _ in self._parameters.values() if is_sharded(p)]
        self.in_shards = bool(sharded)
        if not all(divides_evenly(parameter, group) for parameter in sharded):
            self.why_not = "it lies in shards of more than one dimension"

    # ------------------------------------------------------------------ receiver

    def begin(self) -> None:
        """A transfer begins: nothing has come."""
        self._group.order(Op.INNER, Act.BEGIN)
        self._staged.clear()

    def stage(self, entry: Entry, data: bytearray) -> None:
        """Keep an entry of a peer's state, on every rank what it needs of it.

        Raises:
            TransferError: not finite, or not to be divided as its parameter is.
        """
        tensor = finite_tensor(entry, data)
        if self._is_divided(entry) is None:
            raise TransferError(f"{entry.parameter}, {entry.key}: cannot be divided among ranks")
        self._tell(Act.STAGE, entry)
        self._stage(entry, tensor)

    def commit(self) -> None:
        """What was staged becomes the state, on every rank."""
        self._group.order(Op.INNER, Act.COMMIT)
        self._commit()

    def _commit(self) -> None:
        staged, self._staged = self._staged, {}
        self.replace(staged)

    @torch.no_grad()
    def _stage(self, entry: Entry, whole: Tensor | None) -> None:
        if self._is_divided(entry):
            parameter, _ = self._parameters[entry.optimizer, entry.parameter]
            kept = torch.zeros_like(parameter.detach(), dtype=dtype_of(entry))
            scatter_kept(parameter, kept, whole, self._group)
            self._staged[entry] = kept
        elif whole is not None:
            self._group.send_bytes(raw_bytes(whole))
            self._staged[entry] = whole
        else:
            data = self._group.receive_bytes(entry.num_bytes)
            self._staged[entry] = finite_tensor(entry, data)

    def _is_divided(self, entry: Entry) -> bool | None:
        """Whether ranks hold slices of it; None where that cannot be."""
        parameter, _ = self._parameters[entry.optimizer, entry.parameter]
        if not is_sharded(parameter):
            return False
        if entry.shape == full_shape(parameter):
            return True
        return False if entry.length <= 1 else None

    # ------------------------------------------------------------------ donor

    def copy_slices(self, copies: StateCopies) -> list[Entry]:
        """Begin a copy on every rank; what it holds.

        Raises:
            TransferError: the state of some rank cannot travel.
        """
        self._group.order(Op.INNER, Act.COPY)
        rows = self._begin_copy(copies)
        self._owners = {}
        for rank, data in enumerate(self._group.collect(rows)):
            found = msgspec.msgpack.decode(data, type=list[Entry] | str)
            if isinstance(found, str):
                raise TransferError(found)
            for entry in found:
                self._owners.setdefault(entry, rank)
        return list(self._owners)

    def _begin_copy(self, copies: StateCopies) -> bytes:
        try:
            entries = self.entries()
        except TransferError as error:
            return msgspec.msgpack.encode(str(error)[:1000])
        self._names = {entry: str(number) for number, entry in enumerate(entries)}
        tensors = {self._names[entry]: tensor for entry, tensor in entries.items()}
        self._copy = copies.begin(tensors)
        return msgspec.msgpack.encode(list(entries))

    def whole(self, entry: Entry) -> memoryview:
        """Of the copy."""
        self._tell(Act.GIVE, entry, self._owners[entry])
        tensor = self._give(entry, self._owners[entry])
        assert tensor is not None  # this is rank 0
        return raw_bytes(tensor)

    def _give(self, entry: Entry, owner: int) -> Tensor | None:
        own = None
        if entry in self._names:
            assert self._copy is not None  # there are names of what it holds
            own = self._copy.finish()[self._names[entry]]
        if self._is_divided(entry):
            parameter, _ = self._parameters[entry.optimizer, entry.parameter]
            own = torch.empty(0, dtype=dtype_of(entry)) if own is None else own
            return gather_kept(parameter, own, self._group)
        if owner == 0:
            return own
        if self._group.rank == owner:
            assert own is not None  # the owner has it
            self._group.send(own, 0)
        if not self._group.leads:
            return None
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry))
        self._group.receive(tensor, owner)
        return tensor

    def forget(self) -> None:
        """The copy is needed no longer."""
        self._group.order(Op.INNER, Act.FORGET)
        self._forget()

    def _forget(self) -> None:
        self._copy, self._names, self._owners = None, {}, {}

    # ------------------------------------------------------------------ the others

    def follow(self, order: Order, copies: StateCopies) -> None:
        """Do what rank 0 does."""
        act, length, owner = order.numbers
        if act in (Act.STAGE, Act.GIVE):
            entry = msgspec.msgpack.decode(self._group.receive_bytes(length), type=Entry)
            self._stage(entry, None) if act == Act.STAGE else self._give(entry, owner)
        elif act == Act.BEGIN:
            self._staged.clear()
        elif act == Act.COMMIT:
            self._commit()
        elif act == Act.COPY:
            self._group.collect(self._begin_copy(copies))
        else:
            self._forget()

    def _tell(self, act: Act, entry: Entry, owner: int = 0) -> None:
        data = msgspec.msgpack.encode(entry)
        self._group.order(Op.INNER, act, len(data), owner)
        self._group.send_bytes(data)


def inner_state(
    module: nn.Module, optimizers: Sequence[Optimizer], group: Group | None
) -> InnerState:
    """Of a learner of one process, or of a rank."""
    if group is None:
        return InnerState(module, optimizers)
    return GroupInnerState(module, optimizers, group)
