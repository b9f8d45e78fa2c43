"""Splits of samples over data slots: complete, disjoint, repeatable, by group where they say so."""

import itertools
import random
from collections import Counter

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from dd_lightning.tasks.data import Groups, ShardStream, Split, StreamPlan, write_shards
from dd_lightning.tasks.data.split import deal_samples, own_samples
from dd_lightning.tasks.text import GPTModule, TextDataModule
from dd_lightning.tasks.vision import VisionDataModule, VisionModule
from tests.pictures import write_pictures

pytestmark = pytest.mark.unit

FOLDERS = ("ash", "birch", "cedar")
SPLITS = [Split("group"), Split("dirichlet", 100.0), Split("dirichlet", 1.0, 3)]


def groups_of(samples: int, names=FOLDERS) -> Groups:
    numbers = np.random.default_rng(0).integers(0, len(names), samples).astype(np.int16)
    return Groups(names, numbers, numbers[:9])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder, write_shards(
        folder, "train", [{"bin": str(i).encode()} for i in range(90)], num_shards=4
    )


def in_stored_order(shards) -> list[int]:
    return [i for index in range(len(shards)) for i in range(90)[index :: len(shards)]]


def epoch(prepared, split, slot, slots, number=0, rank=0, ranks=1, seed=0) -> list[int]:
    folder, shards = prepared
    owners = deal_samples(split, groups_of(90), slots, ranks)
    made = ShardStream(
        folder, shards, StreamPlan(seed, slot, slots, rank, ranks), 1,
        collate=lambda samples: int(samples[0]["bin"]),
        owned=own_samples(owners, shards, slot, rank, ranks),
    )  # fmt: skip
    made.start = number * made.samples_per_epoch
    return list(itertools.islice(iter(made), made.samples_per_epoch))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_every_sample_is_in_one_slot_and_one_rank_once_an_epoch(prepared, split, slots):
    for number, ranks in ((0, 1), (1, 2)):
        shares = [
            epoch(prepared, split, slot, slots, number, rank, ranks, seed=slot)
            for slot in range(slots)
            for rank in range(ranks)
        ]
        assert Counter(itertools.chain(*shares)) == Counter(range(90))


@pytest.mark.parametrize(
    ("slots", "held"),
    [
        (1, [{0, 1, 2}]),
        (2, [{0, 2}, {1}]),
        (3, [{0}, {1}, {2}]),
        (5, [{0}, {1}, {2}, {0}, {1}]),
    ],
)
def test_a_slot_holds_the_group_of_its_number(prepared, slots, held):
    group = dict(zip(in_stored_order(prepared[1]), groups_of(90).train.tolist(), strict=True))
    seen = [epoch(prepared, Split("group"), slot, slots) for slot in range(slots)]
    assert [{group[sample] for sample in one} for one in seen] == held
    if slots == 5:  # groups 0 and 1 are shared by two slots each
        assert abs(len(seen[0]) - len(seen[3])) <= 1 and abs(len(seen[1]) - len(seen[4])) <= 1


def test_samples_of_a_slot_come_in_another_order_each_epoch(prepared):
    first, second = (epoch(prepared, Split("group"), 1, 3, number) for number in (0, 1))
    assert first != second and sorted(first) == sorted(second)


def entropy(owners, groups, slots) -> float:
    counts = np.array([np.bincount(groups[owners == s], minlength=3) for s in range(slots)])
    shares = counts / counts.sum(0)
    return float(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(0).mean() / np.log(slots))


def test_the_smaller_alpha_the_less_alike():
    groups = groups_of(3000).train
    alike = [entropy(Split("dirichlet", a).owners(groups, 3, 4), groups, 4) for a in (0.05, 1, 100)]
    assert alike[0] < 0.5 < alike[1] < 0.98 < alike[2]


def test_a_dirichlet_split_is_a_function_of_its_seed():
    groups = groups_of(300).train
    first, again, other = (
        Split("dirichlet", 0.5, seed).owners(groups, 3, 4).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_slot_without_samples_is_refused_with_what_it_needs():
    groups = groups_of(9)
    groups.train[:] = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"slot 8 of 9 with 0 .*'cedar' has 2 .*3 .* needs 3"):
        deal_samples(Split("group"), groups, 9, 1)
    with pytest.raises(ValueError, match=r"slot 2 of 6 with 1 .*at least 2.*2 data slots.*needs 4"):
        deal_samples(Split("group"), groups, 6, 2)
    with pytest.raises(ValueError, match=r"split=dirichlet leaves data slot.*raise .*split_alpha"):
        deal_samples(Split("dirichlet", 0.001), groups, 8, 1)


def test_data_without_groups_has_no_split_by_group():
    for groups, have in ((None, "no groups"), (groups_of(9, ("one",)), "one group, 'one'")):
        with pytest.raises(ValueError, match=f"two or more groups, but the data has {have}"):
            deal_samples(Split("dirichlet"), groups, 2, 1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Settings of texts in three folders of unequal size, each in letters of its own."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for name, letters, count in zip(FOLDERS, ("abc", "def", "ghi"), (60, 40, 30), strict=True):
        (folder / name).mkdir()
        for index in range(count):
            (folder / name / f"{index}.txt").write_text("".join(draw.choices(letters, k=200)))
    return {
        "source": "folder", "path": str(folder), "sequence_length": 8, "batch_size": 4,
        "num_shards": 8, "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip


def made(kind, settings, **changes):
    datamodule = kind(**{**settings, **changes})
    datamodule.prepare_data()
    return datamodule


def drawn(datamodule, batches) -> list[dict]:
    return list(itertools.islice(iter(datamodule.train_dataloader()), batches))


def test_a_slot_reads_the_texts_of_its_folder_and_the_manifest_tells_the_files(text):
    for slot, letters in enumerate(("abc", "def", "ghi")):
        datamodule = made(TextDataModule, text, split="group", data_slot=slot, num_data_slots=3)
        batches = drawn(datamodule, 200)
        found = Counter(
            bytes(torch.cat([b["labels"].flatten() for b in batches]).tolist()).decode()
        )
        # all but the rest of a sequence in which the next document begins
        assert sum(found[c] for c in letters) / found.total() > 0.96
    assert set(datamodule.manifest().files) == {"train-groups.npy", "validation-groups.npy"}
    assert datamodule.groups().names == FOLDERS


def test_a_slot_sees_the_classes_of_its_number(tmp_path):
    pictures = {
        "source": "folder", "path": str(write_pictures(tmp_path / "pictures", each=40)),
        "classes": 4, "num_shards": 8, "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    for slots, held in ((4, [{0}, {1}, {2}, {3}]), (2, [{0, 2}, {1, 3}])):
        for slot in range(slots):
            datamodule = made(
                VisionDataModule, pictures, split="class", data_slot=slot, num_data_slots=slots
            )
            batches = drawn(datamodule, 20)
            assert set(torch.cat([b["labels"] for b in batches]).tolist()) == held[slot]
    validated = made(VisionDataModule, pictures, group_losses=True)
    logged = validate(VisionModule(classes=4), validated)
    names = {"bottom", "left", "right", "top"}
    assert {f"validation_loss_class_{name}" for name in names} < set(logged)


def validate(module, datamodule) -> dict[str, float]:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    return trainer.validate(module, datamodule=datamodule, verbose=False)[0]


def test_losses_of_groups_are_those_of_their_samples(text):
    torch.manual_seed(0)
    module = GPTModule({"max_length": 8, "width": 8, "depth": 1, "heads": 1})
    datamodule = made(TextDataModule, text, group_losses=True, validation_samples=150)
    logged = validate(module, datamodule)
    sums, counts = Counter(), Counter()
    for batch in datamodule.val_dataloader():
        for row, group in enumerate(batch["group"].tolist()):
            one = {name: batch[name][row : row + 1] for name in ("input_ids", "labels")}
            sums[group] += float(module.loss(one).detach())
            counts[group] += 1
    for group, name in enumerate(FOLDERS):
        expected = sums[group] / counts[group]
        assert logged[f"validation_loss_group_{name}"] == pytest.approx(expected, rel=1e-5)
    assert logged["val_loss"] == pytest.approx(sums.total() / counts.total(), rel=1e-5)


def test_a_group_without_validation_samples_has_no_loss(text):
    with pytest.raises(ValueError, match=r"first 1 validation samples is of group .*raise"):
        made(TextDataModule, text, group_losses=True, validation_samples=1).val_dataloader()


def test_resuming_goes_on_in_the_same_split_only(text, caplog):
    split = {"split": "dirichlet", "split_seed": 2, "data_slot": 1, "num_data_slots": 2}
    whole = [batch["labels"] for batch in drawn(made(TextDataModule, text, **split), 60)]
    first = made(TextDataModule, text, **split)
    first.skip_to(37)
    rest = made(TextDataModule, text, **split)
    rest.load_state_dict(first.state_dict())
    assert torch.equal(
        torch.stack([batch["labels"] for batch in drawn(rest, 23)]), torch.stack(whole[37:])
    )
    for other in ({}, {"split": "group"}, {"split": "dirichlet", "split_seed": 3}):
        datamodule = made(TextDataModule, text, data_slot=1, num_data_slots=2, **other)
        datamodule.load_state_dict(first.state_dict())
        assert datamodule.batches_consumed == 0
    assert "split dirichlet 0.5 seed 2 there, iid here" in caplog.text


def test_preparing_refuses_a_split_that_leaves_a_slot_empty(text):
    with pytest.raises(ValueError, match=r"split=dirichlet leaves data slot"):
        made(TextDataModule, text, split="dirichlet", split_alpha=0.001, num_data_slots=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "random"}, "task.data.split is 'random', allowed are"),
        ({"split": "era"}, r"task.data.split is 'era', allowed with task.data.source=folder are"),
        ({"split": "dirichlet", "split_alpha": 0}, "task.data.split_alpha is 0, allowed"),
        ({"split_seed": -1}, "task.data.split_seed is -1"),
    ],
)
def test_wrong_splits_are_refused(text, changes, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**{**text, **changes})


def test_an_alpha_without_effect_is_told(text):
    with pytest.warns(UserWarning, match=r"split_alpha=2 has no effect with split=group"):
        TextDataModule(**text, split="group", split_alpha=2)
