"""The ranks of one learner: what they agree on at a boundary, and what rank 0 has the others do.

Rank 0 alone talks to the syncer. The others obey its orders in `sections`, which open and close on
every rank alike. All collectives are issued by the training thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from dd_lightning.learner.group_stop import SharedStop

NUM_ARGUMENTS = 3  # of an order
MOST_ERROR_BYTES = 4000
_RAISED = {kind.__name__: kind for kind in (ConnectionError, InterruptedError, TimeoutError)}


class Op(IntEnum):
    """What rank 0 orders."""

    END = 0  # of the section: flags, steps of the learner
    ERROR = 1  # rank 0 failed: number of bytes of the message that follows
    WRITE = 2  # take a fragment's tensors from rank 0: fragment
    READ = 3  # hand this rank's shards of a fragment to rank 0: fragment
    WELCOME = 4  # admitted: number of bytes that follow
    CUT = 6  # a consistent cut is recorded: number of bytes of its id, which follow
    INNER = 5  # of the inner optimizers' state: see `group_inner.py`


@dataclass(frozen=True, slots=True)
class Order:
    """`op` and its numbers."""

    op: Op
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after the one small collective of a boundary."""

    tokens: int  # of all ranks
    is_busy: bool  # rank 0 opens a section now


class Group:
    """Collectives among the processes of one learner.

    A rank that is gone shows as a RuntimeError in the others at once (its connections close), one
    that hangs after the process group's timeout; either ends the whole learner, never another one.

    Args:
        timeout: of the process group; the longest that ranks wait for each other.
        stop: of this rank.
    """

    def __init__(self, timeout: timedelta | None, stop: SharedStop) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.stop = stop
        # Small numbers go between CPUs: a GPU's collective would make the training thread wait for
        # all that is queued on the device before it.
        gloo = dist.get_backend() == dist.Backend.GLOO
        self._control = None if gloo else dist.new_group(backend="gloo", timeout=timeout)
        self._timeout, self._in_section = timeout, False

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def agree(self, tokens: int, has_stepped: bool, is_busy: bool = False) -> Agreement:
        """One all-reduce of four integers: the tokens' sum comes with what rank 0 has to say, and
        a SIGTERM that any rank has got stops them all.

        Args:
            is_busy: of rank 0.

        Raises:
            RuntimeError: an optimizer stepped on some ranks only.
        """
        lanes = torch.tensor([tokens, has_stepped, is_busy, self.stop.told])
        dist.all_reduce(lanes, group=self._control)
        total, stepped, busy, stops = lanes.tolist()
        if stepped not in (0, self.size):
            raise RuntimeError(
                f"an optimizer step happened on {stepped} of this learner's {self.size} ranks: "
                "their parameters differ now. Let every rank step with every batch."
            )
        if stops:
            self.stop.obey()
        return Agreement(total, busy > 0)

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, the ranks in order; all have as many."""
        own = torch.tensor(numbers, dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self._control)
        return [row.tolist() for row in rows]

    def collect(self, data: bytes) -> list[bytearray]:
        """Of every rank, on rank 0 (empty on the others); each calls it at the same point."""
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        dist.all_reduce(lengths, group=self._control)
        if not self.leads:
            self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
            return []
        found = [bytearray(data), *(bytearray(length) for length in lengths.tolist()[1:])]
        for rank in range(1, self.size):
            self.receive(torch.frombuffer(found[rank], dtype=torch.uint8), rank)
        return found

    def another(self) -> dist.ProcessGroup:
        """A process group of the same ranks for another thread; every rank calls it."""
        return dist.new_group(backend="gloo", timeout=self._timeout)

    # ------------------------------------------------------------------ rank 0

    @contextlib.contextmanager
    def section(self, result: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Rank 0 acts for all in the block, the others are in `follow`.

        An error in the block is raised on every rank; ranks that are gone cannot be told.

        Args:
            result: (flags, steps) for the others at the end.
        """
        assert not self._in_section  # sections do not nest
        self._in_section = True
        try:
            yield
            self.order(Op.END, *result())
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # what torch raises where a rank is gone
                text = f"{type(error).__name__}\n{error}".encode()[:MOST_ERROR_BYTES]
                self.order(Op.ERROR, len(text))
                self.send_bytes(text)
            raise
        finally:
            self._in_section = False

    def order(self, op: Op, *numbers: int) -> None:
        """Say what comes next."""
        assert self._in_section  # else nobody listens
        dist.broadcast(torch.tensor([op, *numbers, *[0] * (NUM_ARGUMENTS - len(numbers))]), 0,
                       group=self._control)  # fmt: skip

    def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """Their number must be known to the others."""
        if len(data):
            dist.broadcast(
                torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._control
            )

    # ------------------------------------------------------------------ the others

    def follow(self, obey: Callable[[Order], None]) -> Order:
        """Do what rank 0 orders until it ends the section; its last order.

        Raises:
            ConnectionError, InterruptedError, TimeoutError: what rank 0 raised.
            RuntimeError: another error of rank 0.
        """
        while True:
            header = torch.zeros(1 + NUM_ARGUMENTS, dtype=torch.int64)
            dist.broadcast(header, 0, group=self._control)
            op, *numbers = header.tolist()
            order = Order(Op(op), tuple(numbers))
            if order.op == Op.END:
                return order
            if order.op == Op.ERROR:
                kind, _, text = bytes(self.receive_bytes(numbers[0])).decode().partition("\n")
                raise _RAISED.get(kind, RuntimeError)(
                    text if kind in _RAISED else f"rank 0 of this learner: {kind}: {text}"
                )
            obey(order)

    def receive_bytes(self, length: int) -> bytearray:
        """What rank 0 sends."""
        data = bytearray(length)
        if length:
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._control)
        return data

    # ------------------------------------------------------------------ tensors

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0, into place."""
        dense = tensor.contiguous()
        dist.broadcast(dense, 0, group=self._path(dense))
        if dense is not tensor:
            tensor.copy_(dense)

    def send(self, tensor: Tensor, rank: int) -> None:
        """To one rank."""
        dist.send(tensor.contiguous(), rank, group=self._path(tensor))

    def receive(self, tensor: Tensor, rank: int) -> None:
        """From one rank, into a contiguous tensor."""
        dist.recv(tensor, rank, group=self._path(tensor))

    def _path(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._control if tensor.device.type == "cpu" else None
