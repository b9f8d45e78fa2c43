"""What the tasks' LightningDataModules share: data slots, an endless resumable stream of training
batches, the same validation for everyone."""

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import lightning.pytorch as pl
import numpy as np
from torch.utils.data import DataLoader

from .groups import GroupedCollate, Groups, first_groups, read_groups
from .ready import ReadyShards
from .shards import Manifest, Shard, read_manifest
from .split import ALPHA, NATURAL, Split, deal_samples, own_samples
from .stream import ShardStream, StreamPlan

log = logging.getLogger(__name__)


class DataSettings(Protocol):
    """A frozen dataclass of what determines a data set: the fields of its `task.data`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def folder(self) -> Path:
        """Where the data set is, or will be."""
        ...

    def prepare(self) -> Path:
        """Build it where it does not exist yet; safe from many processes at once."""
        ...


class ShardDataModule(pl.LightningDataModule):
    """Batches of a prepared folder; the position is part of the checkpoint.

    A task derives from it: `settings`, `reader`, `collate`; `augment` where it draws at random.

    Args:
        batch_size: samples a step and rank.
        num_workers: loader processes; any number gives the same batches.
        seed: order of the training stream.
        data_slot, num_data_slots: this learner's fixed, disjoint share of the training shards.
        validation_samples: the same first samples for everyone, at most so many.
        split, split_alpha, split_seed: how samples are dealt to data slots, see `Split`.
        group_losses: validation batches say each sample's group, so that the module logs a
            validation loss of each (see `log_group_losses`).
        **data: fields of `settings`.
    """

    settings: type[DataSettings]

    def __init__(
        self,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
        data_slot: int = 0,
        num_data_slots: int = 1,
        validation_samples: int = 256,
        split: str = "iid",
        split_alpha: float = ALPHA,
        split_seed: int = 0,
        group_losses: bool = False,
        **data: Any,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("validation_samples", validation_samples)):
            if value < 1:
                raise ValueError(f"task.data.{name} is {value!r}, allowed are integers >= 1")
        allowed = sorted(self.settings.__dataclass_fields__)
        if unknown := sorted(set(data) - set(allowed)):
            raise ValueError(f"task.data has no {', '.join(unknown)}; allowed are also {allowed}")
        StreamPlan(seed, data_slot, num_data_slots)  # refuses a wrong slot before anything starts
        self.data = self.settings(**data)
        self.split = Split(split, split_alpha, split_seed)
        if split not in (allowed := self.splits()):
            source = getattr(self.data, "source", None)
            where = f" with task.data.source={source}" if source else ""
            raise ValueError(f"task.data.split is {split!r}, allowed{where} are {allowed}")
        if split != "dirichlet" and split_alpha != ALPHA:
            warnings.warn(
                f"task.data.split_alpha={split_alpha:g} has no effect with split={split}: it "
                "belongs to task.data.split=dirichlet",
                stacklevel=2,
            )
        self.group_losses = group_losses
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.data_slot = data_slot
        self.num_data_slots = num_data_slots
        self.validation_samples = validation_samples
        self.samples_consumed = 0
        self._stream: ShardStream | None = None

    def reader(self) -> Callable[[Path], Sequence[Any]]:
        """A picklable function: the samples of one shard, in stored order."""
        raise NotImplementedError

    def collate(self) -> Callable[[list[Any]], Any]:
        """A picklable function: a batch of samples."""
        raise NotImplementedError

    def ready(self) -> ReadyShards | None:
        """The shards of `source=shards`, where the task has that."""
        return None

    def splits(self) -> tuple[str, ...]:
        """Names of the splits that this task's data has."""
        return ("iid",)

    def augment(self, batch: Any, position: tuple[int, ...]) -> Any:
        """A training batch as the model sees it, on its device; random only as a function of
        `position`, which no other batch of any slot and rank shares."""
        return batch

    @property
    def batches_consumed(self) -> int:
        """Training batches that reached the model on this rank, restored ones included."""
        return self.samples_consumed // self.batch_size

    @cached_property
    def folder(self) -> Path:
        """Where the shards are, or will be; found once, since that may take reading the source."""
        return self.data.folder()

    def prepare_data(self) -> None:
        """Build the shards where they do not exist yet.

        Raises:
            ValueError: the source cannot be had, or the split leaves a data slot without samples.
        """
        self.data.prepare()
        if self.split.name != "iid":
            deal_samples(self.split, self.groups(), self.num_data_slots, num_ranks=1)

    def manifest(self) -> Manifest:
        """Manifest of the prepared folder."""
        return read_manifest(self.folder)

    def groups(self) -> Groups | None:
        """Groups of the prepared folder's samples, where its source has any."""
        return read_groups(self.folder, self.manifest())

    def train_dataloader(self) -> DataLoader:
        shards, plan = self.manifest().train, self._plan()
        self._stream = ShardStream(
            self.folder,
            shards,
            plan,
            self.batch_size,
            collate=self.collate(),
            read=self._read(),
            owned=self._owned(shards, plan),
        )
        self._stream.start = self.samples_consumed
        return DataLoader(self._stream, batch_size=None, num_workers=self.num_workers)

    def _owned(self, shards: Sequence[Shard], plan: StreamPlan) -> dict[int, np.ndarray] | None:
        if self.split.name == "iid":
            return None
        owners = deal_samples(self.split, self.groups(), plan.num_data_slots, plan.num_ranks)
        return own_samples(owners, shards, plan.data_slot, plan.rank, plan.num_ranks)

    def val_dataloader(self) -> DataLoader:
        fixed = list(itertools.islice(self._validation(), self.validation_samples))
        collate = self.collate()
        if self.group_losses:
            numbers = first_groups(self.groups(), len(fixed))
            fixed = list(zip(fixed, numbers, strict=True))
            collate = GroupedCollate(collate, self._group_names())
        return DataLoader(fixed, batch_size=self.batch_size, collate_fn=collate)

    def _group_names(self) -> tuple[str, ...]:
        """Of the groups as metrics have them: with the name of the natural split before them."""
        groups = self.groups()
        kind = next(name for name in self.splits() if name in NATURAL)
        return () if groups is None else tuple(f"{kind}_{slug}" for slug in groups.slugs())

    def fetch_shards(self) -> None:
        """Fetch every shard that is not here yet, for a training without a network.

        Raises:
            ValueError: one of them cannot be had, or is not what the manifest recorded.
        """
        manifest, ready = self.manifest(), self.ready()
        if ready is not None:
            have = ready.fetching(lambda path: None, manifest)
            for shard in manifest.train + manifest.validation:
                have(self.folder / shard.file)

    def _read(self) -> Callable[[Path], Sequence[Any]]:
        """`reader`, of shards that may have to be fetched first."""
        ready = self.ready()
        read = self.reader()
        return read if ready is None else ready.fetching(read, self.manifest())

    def _validation(self) -> Iterator[Any]:
        read = self._read()
        for shard in self.manifest().validation:
            yield from read(self.folder / shard.file)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Counted here, not in the dataset: loader processes and Lightning's prefetching run ahead
        # of the model, and batches that they drop at a restart have not been consumed.
        if self.trainer is not None and self.trainer.training:
            plan = self._plan()
            batch = self.augment(
                batch, (plan.seed, plan.data_slot, plan.rank, self.samples_consumed)
            )
            self.samples_consumed += self.batch_size
            if self._stream is not None:
                self._stream.start = self.samples_consumed  # where a new iteration begins
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples_consumed,
            "batches": self.batches_consumed,
            "stream": self._identity(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` stopped; a position of another stream is not used."""
        ours, stored = self._identity(), state_dict["stream"]
        if different := [
            f"{name} {stored.get(name, 'iid')} there, {ours.get(name, 'iid')} here"
            for name in {**ours, **stored}
            if stored.get(name) != ours.get(name)
        ]:
            log.warning(
                "the checkpoint's data position (%d batches) is not used: it belongs to another "
                "stream (%s); this one starts at %d batches",
                state_dict["batches"],
                "; ".join(different),
                self.batches_consumed,
            )
            return
        self.samples_consumed = state_dict["samples"]
        if self._stream is not None:
            self._stream.start = self.samples_consumed

    def skip_to(self, batches: int) -> None:
        """Go on after the stream's first `batches` batches; never backward. Called before the
        training dataloader is made."""
        self.samples_consumed = max(self.samples_consumed, batches * self.batch_size)
        if self._stream is not None:
            self._stream.start = self.samples_consumed

    def _plan(self) -> StreamPlan:
        # The Trainer's ranks are the learner's; RANK in the environment may be anyone's.
        rank, num_ranks = 0, 1
        if self.trainer is not None:
            rank, num_ranks = self.trainer.global_rank, self.trainer.world_size
        return StreamPlan(self.seed, self.data_slot, self.num_data_slots, rank, num_ranks)

    def _identity(self) -> dict[str, Any]:
        """What a position belongs to: with any of these changed it points into another stream."""
        plan = self._plan()
        return {
            "data": self.folder.name,
            "seed": plan.seed,
            "data_slot": plan.data_slot,
            "num_data_slots": plan.num_data_slots,
            "num_ranks": plan.num_ranks,
            **({} if self.split.name == "iid" else {"split": self.split.identity}),
        }
