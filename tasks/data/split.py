"""How training samples are dealt to data slots: alike to all (IID), or by group (non-IID).

A split is a pure function of its settings and the data set, so learners that never talk agree on
it: every sample is in exactly one slot. With any split but `iid` a slot owns some samples of each
shard, and reads all shards for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .groups import Groups
from .shards import Shard

NATURAL = ("era", "class", "group")  # names of one rule: what a task's groups are called
ALPHA = 0.5
NAMES = ("iid", *NATURAL, "dirichlet")


@dataclass(frozen=True, slots=True)
class Split:
    """Which samples a data slot gets.

    Args:
        name: "iid": whole shards, alike. "era", "class", "group": data slot i holds group i; where
            slots are fewer it also holds i + slots, i + 2 slots, ...; where they are more, slot i
            shares group i modulo the number of groups evenly with the others of that remainder.
            "dirichlet": each group is dealt in proportions drawn from Dirichlet(alpha).
        alpha: of "dirichlet": a large one is nearly alike, 0.1 gives most of a group to one slot.
        seed: of that draw; the same for all learners.
    """

    name: str = "iid"
    alpha: float = ALPHA
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"task.data.split is {self.name!r}, allowed are {NAMES}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise ValueError(f"task.data.split_alpha is {self.alpha!r}, allowed are numbers > 0")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"task.data.split_alpha is {self.alpha!r}, allowed are numbers > 0")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"task.data.split_seed is {self.seed!r}, allowed are integers >= 0")

    @property
    def identity(self) -> str:
        """All that it depends on, for a checkpoint's position."""
        drawn = f" {self.alpha:g} seed {self.seed}" if self.name == "dirichlet" else ""
        return self.name + drawn

    def owners(self, groups: np.ndarray, num_groups: int, num_data_slots: int) -> np.ndarray:
        """`[samples]`: the data slot of each sample, of any split but `iid`."""
        if self.name == "dirichlet":
            return self._drawn(groups, num_groups, num_data_slots)
        owners = np.empty(len(groups), dtype=np.int64)
        for group in range(num_groups):
            chosen = np.flatnonzero(groups == group)
            sharing = np.array(sharers(group, num_groups, num_data_slots))
            owners[chosen] = sharing[np.arange(len(chosen)) % len(sharing)]
        return owners

    def _drawn(self, groups: np.ndarray, num_groups: int, num_data_slots: int) -> np.ndarray:
        owners = np.empty(len(groups), dtype=np.int64)
        for group in range(num_groups):
            draw = np.random.default_rng([self.seed, group])  # whatever other groups there are
            share = draw.dirichlet(np.full(num_data_slots, float(self.alpha)))
            chosen = draw.permutation(np.flatnonzero(groups == group))
            ends = np.rint(np.cumsum(share)[:-1] * len(chosen)).astype(int)
            for slot, part in enumerate(np.split(chosen, ends)):
                owners[part] = slot
        return owners


def sharers(group: int, num_groups: int, num_data_slots: int) -> list[int]:
    """The data slots among which a group is divided by a natural split: one, or several where there
    are more slots than groups."""
    if num_data_slots <= num_groups:
        return [group % num_data_slots]
    return list(range(group, num_data_slots, num_groups))


def deal_samples(
    split: Split, groups: Groups | None, num_data_slots: int, num_ranks: int
) -> np.ndarray:
    """`[samples]`: the data slot of each training sample.

    Raises:
        ValueError: the data has no groups, or a slot would have fewer samples than ranks.
    """
    if groups is None or len(groups.names) < 2:
        have = "no groups" if groups is None else f"one group, {groups.names[0]!r}"
        raise ValueError(
            f"task.data.split={split.name} needs two or more groups, but the data has {have}: use "
            "split=iid, or with source=folder put the files of each group into a folder of its own"
        )
    owners = split.owners(groups.train, len(groups.names), num_data_slots)
    counts = np.bincount(owners, minlength=num_data_slots)
    slot = int(counts.argmin())
    if counts[slot] < num_ranks:
        raise ValueError(_too_few(split, groups, slot, int(counts[slot]), len(counts), num_ranks))
    return owners


def _too_few(split: Split, groups: Groups, slot: int, have: int, slots: int, ranks: int) -> str:
    found = (
        f"task.data.split={split.name} leaves data slot {slot} of {slots} with {have} training "
        f"samples, at least {ranks} (one a rank) are needed"
    )
    if split.name == "dirichlet":
        return (
            f"{found}: raise task.data.split_alpha (it is {split.alpha:g}), draw with another "
            f"task.data.split_seed (it is {split.seed}), or use fewer data slots"
        )
    group = slot % len(groups.names)
    size = int((groups.train == group).sum())
    sharing = len(sharers(group, len(groups.names), slots))
    return (
        f"{found}: group {groups.names[group]!r} has {size} samples for {sharing} data slots and "
        f"needs {sharing * ranks}; use fewer data slots, or add data to it"
    )


def own_samples(
    owners: np.ndarray, shards: Sequence[Shard], data_slot: int, rank: int, num_ranks: int
) -> dict[int, np.ndarray]:
    """What one rank of a data slot owns: by shard, ascending, the places of its samples in it."""
    mine = np.flatnonzero(owners == data_slot)[rank::num_ranks]
    ends = np.cumsum([shard.samples for shard in shards])
    owned = {}
    for index, part in enumerate(np.split(mine, np.searchsorted(mine, ends[:-1]))):
        if len(part):
            owned[index] = part - (ends[index] - shards[index].samples)
    return owned
