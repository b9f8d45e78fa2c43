"""An endless stream of training batches whose order is a pure function of its plan and position.

What belongs to a data slot (and to a rank inside it) never changes: slots stay disjoint whatever
epoch, speed or seed each has. Only order is shuffled: shards per epoch, samples per shard. An epoch
is a slot's own: slots need not have equally many samples.
Neither RANK/WORLD_SIZE, the global random state nor the number of loader processes matters.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from .shards import Shard, read_shard

_SHARD_ORDER, _SAMPLE_ORDER = 0, 1  # separate random streams


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Whose share of the shards, in which order.

    Args:
        seed: of the order only; >= 0. Learners may have the same or different ones.
        data_slot: 0..num_data_slots-1, the learner's fixed share.
        rank: 0..num_ranks-1, the process inside the learner.
    """

    seed: int = 0
    data_slot: int = 0
    num_data_slots: int = 1
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, allowed are integers >= 0")
        for index, count in (("data_slot", "num_data_slots"), ("rank", "num_ranks")):
            given, allowed = getattr(self, index), getattr(self, count)
            if not 0 <= given < allowed:
                raise ValueError(
                    f"{index} is {given}, allowed are 0..{count}-1 = 0..{allowed - 1}; raise "
                    f"{count} or give each a lower {index}"
                )

    def owned(self, num_shards: int) -> list[int]:
        """Indices of this slot's and rank's shards, ascending.

        Raises:
            ValueError: there are fewer shards than slots x ranks.
        """
        needed = self.num_data_slots * self.num_ranks
        if num_shards < needed:
            raise ValueError(
                f"{num_shards} training shards cannot be split over {self.num_data_slots} data "
                f"slots x {self.num_ranks} ranks: at least {needed} are needed, prepare "
                f"the data with task.data.num_shards={needed} or more"
            )
        return list(range(num_shards))[self.data_slot :: self.num_data_slots][
            self.rank :: self.num_ranks
        ]

    def shard_order(self, epoch: int, owned: Sequence[int]) -> list[int]:
        """The owned shards in the order in which `epoch` reads them."""
        key = [_SHARD_ORDER, self.seed, self.data_slot, self.rank, epoch]
        return [owned[i] for i in np.random.default_rng(key).permutation(len(owned))]

    def sample_order(self, epoch: int, shard: int, num_samples: int) -> np.ndarray:
        """Order of the owned samples of `shard` in `epoch`: a permutation of `num_samples`."""
        key = [_SAMPLE_ORDER, self.seed, shard, epoch]
        return np.random.default_rng(key).permutation(num_samples)


class ShardStream(IterableDataset):
    """Whole batches, so use it with `DataLoader(batch_size=None)`.

    Batch `b` of an iteration that starts at sample `s` holds samples `s + b*batch_size ...` of the
    plan's endless sequence. Several loader processes take turns batch by batch, as DataLoader
    collects them: any number of them gives the same batches, and so does resuming at any `start`.

    Args:
        collate: makes a batch of a list of samples.
        read: the samples of one shard, as many as the manifest says; by default its records. Both
            functions must be picklable where loader processes are used.
        owned: by shard, the places of the samples that the plan's slot and rank own in it; by
            default whole shards, dealt in turns.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        plan: StreamPlan,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        read: Callable[[Path], Sequence[Any]] = read_shard,
        owned: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, allowed are integers >= 1")
        self.folder = folder
        self.shards = shards
        self.plan = plan
        self.batch_size = batch_size
        self.collate = collate
        self.read = read
        self.start = 0  # samples; read when an iteration begins
        if owned is None:
            owned = {i: np.arange(shards[i].samples) for i in plan.owned(len(shards))}
        self.owned = owned
        self.samples_per_epoch = sum(len(places) for places in owned.values())

    def positions(self, start: int) -> Iterator[tuple[int, int]]:
        """Endless (shard index, sample index) from sample `start` of the sequence on."""
        first_epoch, skip = divmod(start, self.samples_per_epoch)
        for epoch in itertools.count(first_epoch):
            for shard in self.plan.shard_order(epoch, list(self.owned)):
                places = self.owned[shard]
                if skip >= len(places):
                    skip -= len(places)
                    continue
                for place in self.plan.sample_order(epoch, shard, len(places))[skip:]:
                    yield shard, int(places[place])
                skip = 0

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()  # torch's name for a loader process
        turn, turns = (process.id, process.num_workers) if process else (0, 1)
        positions = self.positions(self.start)
        loaded: tuple[int, Sequence[Any]] = (-1, [])
        for number in itertools.count():
            batch = []
            for shard, sample in itertools.islice(positions, self.batch_size):
                if number % turns != turn:
                    continue
                if loaded[0] != shard:
                    loaded = (shard, self.read(self.folder / self.shards[shard].file))
                batch.append(loaded[1][sample])
            if batch:
                yield self.collate(batch)
