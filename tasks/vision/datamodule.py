"""Pictures for classification, from the shards of `VisionData`, by torchvision's transforms v2."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dd_lightning.tasks.data import ReadyShards, ShardDataModule, read_shard

from .pictures import decode
from .prepare import VisionData

BLACK = -1.0  # a normalised pixel


def to_pixels(png: bytes) -> Tensor:
    """`[3, S, S]` uint8."""
    return torch.from_numpy(np.array(decode(png))).permute(2, 0, 1).contiguous()


class Pictures(Sequence[tuple[Tensor, int]]):
    """The samples of one shard, `[3, S, S]` uint8 and the number of the class; decoded when asked
    for, since a non-IID data slot uses few of a shard."""

    def __init__(self, records: Sequence[Mapping[str, bytes]]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        record = self._records[index]
        return to_pixels(record["png"]), int(record["cls"])


def read_pictures(path: Path) -> Pictures:
    """The samples of one shard."""
    return Pictures(read_shard(path))


def normalised(pictures: Sequence[Tensor]) -> Tensor:
    """`[B, 3, S, S]` float32 in -1..1."""
    from torchvision.transforms import v2

    normalise = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    )
    return normalise(torch.stack(list(pictures)))


def to_batch(samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """`pixels` `[B, 3, S, S]` float32 in -1..1, `labels` `[B]` int64."""
    pixels = normalised([pixels for pixels, _ in samples])
    return {"pixels": pixels, "labels": torch.tensor([label for _, label in samples])}


class VisionDataModule(ShardDataModule):
    """Batches `{"pixels", "labels"}`; training pictures are shifted, and mirrored if `flip`.

    Args:
        crop_padding: a training picture moves by at most so many pixels each way, into black.
        flip: mirror every second one left to right; not for digits or letters.
        **settings: those of `ShardDataModule`, and the fields of `VisionData`.
    """

    settings: type[Any] = VisionData
    fill = BLACK  # where a shift uncovers nothing

    def __init__(
        self,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 0,
        data_slot: int = 0,
        num_data_slots: int = 1,
        validation_samples: int = 512,
        crop_padding: int = 0,
        flip: bool = False,
        **data: Any,
    ) -> None:
        super().__init__(
            batch_size, num_workers, seed, data_slot, num_data_slots, validation_samples, **data
        )
        if not isinstance(crop_padding, int) or not 0 <= crop_padding < self.data.size:
            raise ValueError(
                f"task.data.crop_padding is {crop_padding!r}, allowed are 0..{self.data.size - 1} "
                "(pixels, below task.data.size)"
            )
        self.crop_padding = crop_padding
        self.flip = flip

    def ready(self) -> ReadyShards | None:
        return self.data.ready()

    def splits(self) -> tuple[str, ...]:
        return ("iid", "class", "dirichlet")

    def reader(self) -> Callable[[Path], Sequence[Any]]:
        return read_pictures

    def collate(self) -> Callable[[list[Any]], Any]:
        return to_batch

    def augment(self, batch: Any, position: tuple[int, ...]) -> Any:
        """The same shifts for the same position, whoever draws it and how often: a learner that
        comes back sees what it saw. The global random state is left as it was."""
        transform = self._augmentation()
        if transform is None:
            return batch
        (seed,) = np.random.SeedSequence(position).generate_state(1)
        state = torch.default_generator.get_state()
        try:
            torch.default_generator.manual_seed(int(seed))  # transforms v2 take no generator
            pixels = torch.stack([transform(one) for one in batch["pixels"]])
        finally:
            torch.default_generator.set_state(state)
        return {**batch, "pixels": pixels}

    def _augmentation(self) -> Callable[[Tensor], Tensor] | None:
        from torchvision.transforms import v2

        steps: list[Any] = []
        if self.crop_padding:
            steps.append(v2.RandomCrop(self.data.size, padding=self.crop_padding, fill=self.fill))
        if self.flip:
            steps.append(v2.RandomHorizontalFlip(0.5))
        return v2.Compose(steps) if steps else None
