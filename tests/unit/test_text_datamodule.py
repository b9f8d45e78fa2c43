"""TextDataModule: batches, validation, and a position that survives any stop of a Trainer."""

import itertools
import random

import lightning.pytorch as pl
import pytest
import torch

from dd_lightning.tasks.text import GPTModule, TextDataModule

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for index in range(40):
        (folder / f"{index}.txt").write_text("".join(draw.choices("etaoin shrdlu", k=200)))
    return folder


@pytest.fixture(scope="module")
def settings(texts, tmp_path_factory):
    return {
        "source": "folder",
        "path": str(texts),
        "sequence_length": 8,
        "batch_size": 4,
        "num_shards": 8,
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }


def prepared(settings, **changes) -> TextDataModule:
    datamodule = TextDataModule(**{**settings, **changes})
    datamodule.prepare_data()
    return datamodule


def take(loader, count: int) -> list[torch.Tensor]:
    return [batch["input_ids"] for batch in itertools.islice(iter(loader), count)]


class Recorder(GPTModule):
    """Keeps what it was trained on; can stop in the middle of nowhere."""

    def __init__(self) -> None:
        super().__init__(
            {"max_length": 8, "width": 8, "depth": 1, "heads": 1}, {"schedule": "constant"}
        )
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch, batch_index):
        self.seen.append(batch["input_ids"].clone())
        return super().training_step(batch, batch_index)


def trainer(folder, steps: int, **options) -> pl.Trainer:
    return pl.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", devices=1, logger=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, enable_checkpointing=False, **options,
    )  # fmt: skip


def train(settings, folder, steps: int, checkpoint=None, **options) -> Recorder:
    pl.seed_everything(0, verbose=False)
    module = Recorder()
    workers = options.pop("num_workers", 0)
    options.setdefault("limit_val_batches", 0)
    run = trainer(folder, steps, **options)
    run.fit(module, prepared(settings, num_workers=workers), ckpt_path=checkpoint)
    run.save_checkpoint(folder / f"{steps}.ckpt")
    return module


def test_batches_are_inputs_and_the_next_bytes(settings):
    batch = next(iter(prepared(settings).train_dataloader()))
    assert {name: (t.shape, t.dtype) for name, t in batch.items()} == {
        "input_ids": ((4, 8), torch.int64),
        "labels": ((4, 8), torch.int64),
    }
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])


def test_slots_share_no_sequence_and_validation_is_the_same(settings):
    modules = [prepared(settings, data_slot=slot, num_data_slots=4) for slot in range(4)]
    streams = [module.train_dataloader() for module in modules]
    owned = [module._stream.samples_per_epoch for module in modules]
    assert sum(owned) == sum(shard.samples for shard in modules[0].manifest().train)
    seen = [
        {row.numpy().tobytes() for batch in take(s, n // 4) for row in batch}
        for s, n in zip(streams, owned, strict=True)
    ]
    assert all(not a & b for a, b in itertools.combinations(seen, 2))
    first, second = (take(modules[slot].val_dataloader(), 99) for slot in (0, 3))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_validation_is_capped(settings):
    loader = prepared(settings, validation_samples=6).val_dataloader()
    assert [len(batch) for batch in take(loader, 99)] == [4, 2]


@pytest.mark.parametrize("stop", [1, 3, 7])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(settings, tmp_path, stop, num_workers):
    whole = train(settings, tmp_path, 10)
    first = train(settings, tmp_path, stop, num_workers=num_workers)
    rest = train(settings, tmp_path, 10, tmp_path / f"{stop}.ckpt", num_workers=num_workers)
    assert torch.equal(torch.stack(first.seen + rest.seen), torch.stack(whole.seen))
    same = zip(whole.parameters(), rest.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in same)


def test_short_lightning_epochs_and_validation_do_not_lose_batches(settings, tmp_path):
    whole = train(settings, tmp_path, 9)
    parts = train(settings, tmp_path, 9, limit_train_batches=2, limit_val_batches=1)
    assert torch.equal(torch.stack(parts.seen), torch.stack(whole.seen))


def test_position_counts_batches_of_the_model_not_prefetched_ones(settings, tmp_path):
    datamodule = prepared(settings)
    trainer(tmp_path, 5, limit_val_batches=1, val_check_interval=2).fit(Recorder(), datamodule)
    assert datamodule.batches_consumed == 5
    assert datamodule.state_dict()["samples"] == 20


def test_a_position_of_another_stream_is_not_used_and_says_so(settings, caplog):
    state = {**prepared(settings, seed=1).state_dict(), "samples": 40, "batches": 10}
    datamodule = prepared(settings, seed=2)
    datamodule.load_state_dict(state)
    assert datamodule.batches_consumed == 0
    assert "seed 1 there, 2 here" in caplog.text


def test_data_must_be_prepared_first(settings, tmp_path):
    with pytest.raises(ValueError, match=r"no prepared data.*prepare_data"):
        TextDataModule(**{**settings, "cache_dir": str(tmp_path)}).train_dataloader()


def test_more_slots_than_shards_are_refused(settings):
    with pytest.raises(ValueError, match=r"8 training shards.*at least 9"):
        prepared(settings, data_slot=0, num_data_slots=9).train_dataloader()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batchsize": 3}, "task.data has no batchsize; allowed are also"),
        ({"batch_size": 0}, "task.data.batch_size is 0"),
        ({"validation_samples": 0}, "task.data.validation_samples is 0"),
        ({"data_slot": 1}, "data_slot is 1, allowed are"),
    ],
)
def test_wrong_settings_are_refused(settings, changes, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**{**settings, **changes})


@pytest.mark.parametrize("made_before", [False, True])
def test_skipping_is_having_drawn_so_many(settings, made_before):
    whole = prepared(settings)
    expected = take(whole.train_dataloader(), 300)
    assert 290 * whole.batch_size > whole._stream.samples_per_epoch  # into the second epoch
    for batches in (0, 1, 7, 290):
        datamodule = prepared(settings)
        early = datamodule.train_dataloader() if made_before else None
        datamodule.skip_to(batches)
        loader = datamodule.train_dataloader() if early is None else early
        rest = take(loader, 300 - batches)
        assert torch.equal(torch.stack(rest), torch.stack(expected[batches:]))
        assert datamodule.state_dict()["batches"] == batches


def test_skipping_never_goes_backward(settings):
    datamodule = prepared(settings)
    datamodule.skip_to(9)
    datamodule.skip_to(4)
    assert datamodule.batches_consumed == 9
