"""VisionTransformer and ResNet under a plain Trainer; batches, shifts and positions of the data."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dd_lightning.tasks.vision import ResNetConfig, VisionDataModule, VisionModule, ViTConfig
from tests.pictures import write_pictures
from tests.trainers import QUIET

pytestmark = pytest.mark.unit

VIT = {"patch": 4, "width": 16, "depth": 1, "heads": 2}
RESNET = {"width": 4, "depth": 1}
FAST = {"lr": 1e-2, "warmup_steps": 5}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return {
        "source": "folder",
        "path": str(write_pictures(tmp_path_factory.mktemp("pictures"))),
        "classes": 4,
        "num_shards": 8,
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }


def prepared(settings, **changes) -> VisionDataModule:
    datamodule = VisionDataModule(**{**settings, **changes})
    datamodule.prepare_data()
    return datamodule


def module(architecture: str, kind: type[VisionModule] = VisionModule) -> VisionModule:
    pl.seed_everything(0, verbose=False)
    return kind(architecture, size=8, classes=4, vit=VIT, resnet=RESNET, optimizer=FAST)


class Recorder(VisionModule):
    """Keeps what it was trained on."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch, batch_index):
        self.seen.append(batch["pixels"].clone())
        return super().training_step(batch, batch_index)


def train(settings, steps, checkpoint=None, architecture="vit", **data):
    run = pl.Trainer(**QUIET, max_steps=steps, limit_val_batches=0)
    ours = module(architecture, Recorder)
    datamodule = prepared(settings, crop_padding=2, flip=True, **data)
    run.fit(ours, datamodule, ckpt_path=checkpoint)
    return ours, run


@pytest.mark.parametrize("config", [ViTConfig(), ResNetConfig(), ResNetConfig(width=32, depth=2)])
@pytest.mark.parametrize("size", [8, 32])
def test_networks_are_torchvisions_and_small(config, size):
    network = config.build(size, 7)
    assert type(network).__module__.startswith("torchvision.models.")
    assert network(torch.zeros(2, 3, size, size)).shape == (2, 7)
    assert sum(p.numel() for p in network.parameters()) < 1_000_000


def test_the_resnet_has_batch_norm_in_each_stage():
    network = ResNetConfig().build(8, 10)
    widths = [m.num_features for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert sorted(set(widths)) == [16, 32, 64]
    assert all(p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("architecture", ["vit", "resnet"])
def test_training_raises_the_accuracy_on_pictures_held_out(settings, architecture):
    ours, datamodule = module(architecture), prepared(settings, batch_size=16)
    run = pl.Trainer(**QUIET, max_steps=40, limit_val_batches=1.0, val_check_interval=40)
    (before,) = run.validate(ours, datamodule, verbose=False)
    run.fit(ours, datamodule)
    (after,) = run.validate(ours, datamodule, verbose=False)
    assert before["accuracy"] < 0.6 and after["accuracy"] > 0.9
    assert after["val_loss"] < 0.5 * before["val_loss"]


def test_validation_is_the_mean_over_pictures_with_an_unequal_last_batch(settings):
    ours, datamodule = module("vit"), prepared(settings, batch_size=7, validation_samples=17)
    run = pl.Trainer(**QUIET)
    (found,) = run.validate(ours, datamodule, verbose=False)
    batches = list(datamodule.val_dataloader())
    assert [len(batch["labels"]) for batch in batches] == [7, 7, 3]
    pixels, labels = (torch.cat([batch[name] for batch in batches]) for name in batches[0])
    logits = ours.eval()(pixels)
    assert found["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    right = (logits.argmax(-1) == labels).float().mean().item()
    assert found["accuracy"] == pytest.approx(right)


def test_batches_are_normalised_and_counted_by_pictures(settings):
    batch = next(iter(prepared(settings, batch_size=5).train_dataloader()))
    assert batch["pixels"].shape == (5, 3, 8, 8) and batch["pixels"].dtype == torch.float32
    assert -1 <= batch["pixels"].min() < -0.8 and 0.5 < batch["pixels"].max() <= 1
    assert batch["labels"].dtype == torch.int64
    assert VisionModule.count_tokens(batch) == 5


def test_slots_share_no_picture_and_leave_none_out(settings):
    seen = []
    for slot in range(4):
        datamodule = prepared(settings, data_slot=slot, num_data_slots=4, batch_size=1)
        loader = datamodule.train_dataloader()
        owned = itertools.islice(iter(loader), datamodule._stream.samples_per_epoch)
        seen.append({batch["pixels"].numpy().tobytes() for batch in owned})
    assert all(not a & b for a, b in itertools.combinations(seen, 2))
    assert sum(map(len, seen)) == sum(shard.samples for shard in datamodule.manifest().train)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_the_same_shifted_pictures(settings, tmp_path, num_workers):
    whole, _ = train(settings, 9)
    first, run = train(settings, 4, num_workers=num_workers)
    run.save_checkpoint(tmp_path / "4.ckpt")
    rest, _ = train(settings, 9, tmp_path / "4.ckpt", num_workers=num_workers)
    assert torch.equal(torch.stack(first.seen + rest.seen), torch.stack(whole.seen))
    same = zip(whole.parameters(), rest.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in same)


def test_shifts_depend_on_the_position_alone_and_leave_the_random_state(settings):
    datamodule = prepared(settings, crop_padding=2, flip=True, batch_size=16)
    batch = next(iter(datamodule.train_dataloader()))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    once = datamodule.augment(batch, (0, 0, 0, 32))["pixels"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(datamodule.augment(batch, (0, 0, 0, 32))["pixels"], once)
    others = [(0, 0, 0, 48), (0, 0, 1, 32), (0, 1, 0, 32), (1, 0, 0, 32)]
    assert not any(torch.equal(datamodule.augment(batch, o)["pixels"], once) for o in others)
    plain = prepared(settings)
    assert plain.augment(batch, (0, 0, 0, 32)) is batch


def test_each_picture_is_shifted_by_itself_into_black(settings):
    datamodule = prepared(settings, crop_padding=2)
    batch = {"pixels": torch.ones(64, 3, 8, 8)}
    shifted = datamodule.augment(batch, (0, 0, 0, 0))["pixels"]
    black = (shifted == -1).float().mean((1, 2, 3))
    assert set(shifted.unique().tolist()) == {-1.0, 1.0}
    assert len(black.unique()) > 3 and black.max() <= 1 - (6 / 8) ** 2


@pytest.mark.parametrize("architecture", ["vit", "resnet"])
def test_a_checkpoint_loads_without_unpickling(settings, tmp_path, architecture):
    ours, run = train(settings, 2, architecture=architecture)
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = VisionModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    pixels = ours.seen[0]
    assert torch.equal(loaded.eval()(pixels), ours.eval()(pixels))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "vgg"}, "task.module.architecture is 'vgg', allowed are"),
        ({"vit": {"patch": 3}}, "vit.patch is 3, which does not divide task.data.size 8"),
        ({"vit": {"width": 15, "heads": 2}}, "not a multiple of vit.heads 2.*width=16"),
        ({"vit": {"layers": 2}}, "vit has no field layers; allowed are"),
        ({"resnet": {"width": 0}}, "resnet.width is 0"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr is 0"),
    ],
)
def test_wrong_settings_of_the_module_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VisionModule(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_padding": 8}, "task.data.crop_padding is 8, allowed are 0..7"),
        ({"batch_size": 0}, "task.data.batch_size is 0"),
        ({"sizes": 3}, "task.data has no sizes; allowed are also"),
        ({"data_slot": 1}, "data_slot is 1, allowed are"),
    ],
)
def test_wrong_settings_of_the_data_are_refused(settings, changes, message):
    with pytest.raises(ValueError, match=message):
        VisionDataModule(**{**settings, **changes})
