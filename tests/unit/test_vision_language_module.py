"""The three objectives under a plain Trainer."""

import math

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from dd_lightning.tasks.vision_language import VisionLanguageDataModule, VisionLanguageModule
from dd_lightning.tasks.vision_language.module import OBJECTIVES
from tests.named_pictures import NAMES, write_named
from tests.trainers import QUIET, assert_equal, values

pytestmark = pytest.mark.unit

SMALL = {
    "size": 8, "vocabulary": 280, "text_length": 12,
    "vit": {"patch": 4, "width": 16, "depth": 1, "heads": 2},
    "gpt": {"width": 16, "depth": 1, "heads": 2},
    "contrast": {"width": 16, "temperature": 0.1, "min_temperature": 0.1},
    "optimizer": {"lr": 1e-2, "warmup_steps": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return {
        "source": "webdataset",
        "path": write_named(tmp_path_factory.mktemp("named")),
        "size": 8,
        "vocabulary": 280,
        "text_length": 12,
        "num_shards": 8,
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }


def prepared(settings, **changes) -> VisionLanguageDataModule:
    datamodule = VisionLanguageDataModule(**{**settings, "batch_size": 16, **changes})
    datamodule.prepare_data()
    return datamodule


def module(objective="both", **changes) -> VisionLanguageModule:
    pl.seed_everything(0, verbose=False)
    return VisionLanguageModule(objective, **{**SMALL, **changes})


def validated(ours, datamodule):
    (found,) = pl.Trainer(**QUIET).validate(ours, datamodule=datamodule, verbose=False)
    return found


def fit(ours, datamodule, steps):
    pl.Trainer(**QUIET, max_steps=steps, limit_val_batches=0).fit(ours, datamodule)


def test_training_improves_every_metric_of_pictures_held_out(settings):
    ours, datamodule = module(), prepared(settings, batch_size=32)
    before = validated(ours, datamodule)
    fit(ours, datamodule, 120)
    after = validated(ours, datamodule)
    assert before["retrieval_candidates"] == after["retrieval_candidates"] <= len(NAMES)
    assert after["val_loss"] < 0.5 * before["val_loss"]
    assert after["caption_bits_per_byte"] < 0.5 * before["caption_bits_per_byte"]
    assert before["recall_at_1"] < 0.4 and after["recall_at_1"] > 0.7
    assert after["recall_at_5"] >= after["recall_at_1"]


def test_each_objective_has_its_own_metrics_and_parameters(settings):
    rooms = {}
    for objective in OBJECTIVES:
        ours = module(objective)
        rooms[objective] = {name.split(".")[0] for name in ours.state_dict()}
        found = validated(ours, prepared(settings))
        assert ("recall_at_1" in found) == (objective != "caption")
        assert ("caption_bits_per_byte" in found) == (objective != "contrastive")
        ours.loss(next(iter(prepared(settings).train_dataloader()))).backward()
        # none left out, which DDP would refuse
        assert all(p.grad is not None for p in ours.parameters())
    assert rooms["contrastive"] == {"encoder", "text", "contrast"}
    assert rooms["caption"] == {"encoder", "captioner"}
    assert rooms["both"] == rooms["contrastive"] | rooms["caption"]


def test_validation_is_over_one_picture_for_each_name(settings):
    ours, datamodule = module(), prepared(settings, batch_size=7)
    found = validated(ours, datamodule)
    batches = list(datamodule.val_dataloader())
    names = torch.cat([batch["name"] for batch in batches]).tolist()
    assert len(set(names)) < len(names)  # there is something to leave out
    assert found["retrieval_candidates"] == len(set(names))
    first = [place for place, name in enumerate(names) if name not in names[:place]]
    with torch.no_grad():
        parts = [ours.eval()(batch) for batch in batches]
    picture, text, nats = (
        torch.cat([p[k] for p in parts])[first] for k in ("picture", "text", "nats")
    )
    scores = parts[0]["scale"] * picture @ text.T
    own = torch.arange(len(first))
    loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
    assert found["contrastive_loss"] == pytest.approx(loss.item(), rel=1e-4)
    num_bytes = torch.cat([batch["num_bytes"] for batch in batches])[first].sum().item()
    bits = nats.sum().item() / math.log(2) / num_bytes
    assert found["caption_bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    assert found["val_loss"] == pytest.approx(found["contrastive_loss"] + found["caption_loss"])


def test_what_stands_after_a_name_changes_nothing(settings):
    ours, batch = module(), next(iter(prepared(settings).train_dataloader()))
    ours.eval()
    places = torch.arange(batch["ids"].shape[1])
    other = torch.where(places > batch["end"][:, None], 77, batch["ids"])
    longer = torch.cat((other, torch.full((len(other), 2), 9)), dim=1)[:, :12]
    with torch.no_grad():
        before, after = ours(batch), ours({**batch, "ids": longer})
    for name in ("text", "nats"):
        torch.testing.assert_close(after[name], before[name])


def test_the_captioner_sees_no_id_before_it_is_due_but_sees_the_picture(settings):
    ours, batch = module("caption"), next(iter(prepared(settings).train_dataloader()))
    changed = batch["ids"].clone()
    changed[:, 2] = 65
    with torch.no_grad():
        tokens = ours.eval().encoder(batch["pixels"])
        before, after = ours.captioner(tokens, batch["ids"]), ours.captioner(tokens, changed)
        blind = ours.captioner(tokens.flip(0), batch["ids"])
    assert before.shape == (*batch["ids"].shape, 280)
    assert torch.equal(before[:, :3], after[:, :3]) and not torch.equal(before[:, 3], after[:, 3])
    assert not torch.allclose(before[:, 0], blind[:, 0])


def test_the_temperature_stays_in_its_bounds_and_can_come_back(settings):
    ours, datamodule = module("contrastive"), prepared(settings)
    lowest = ours.contrast.bounds[1]
    with torch.no_grad():
        ours.contrast.log_scale.fill_(lowest + 5)
    batch = next(iter(datamodule.train_dataloader()))
    assert ours.eval()(batch)["scale"].item() == pytest.approx(10, rel=1e-4)
    ours.train().loss(batch).backward()
    assert ours.contrast.log_scale.item() == pytest.approx(lowest)
    assert ours.contrast.log_scale.grad.item() != 0


def test_two_fits_are_equal_bit_for_bit(settings):
    found = []
    for _ in range(2):
        ours = module()
        fit(ours, prepared(settings, crop_padding=1), 4)
        found.append(values(ours))
    assert_equal(*found)


def test_the_shipped_sizes_are_small_and_a_token_is_a_picture(settings):
    count = {o: sum(p.numel() for p in VisionLanguageModule(o).parameters()) for o in OBJECTIVES}
    assert max(count.values()) == count["both"] < 1_000_000
    batch = next(iter(prepared(settings, batch_size=5).train_dataloader()))
    assert batch["pixels"].shape == (5, 3, 8, 8) and VisionLanguageModule.count_tokens(batch) == 5


def test_a_checkpoint_loads_without_unpickling(settings, tmp_path):
    ours, datamodule = module(), prepared(settings)
    run = pl.Trainer(**QUIET, max_steps=2, limit_val_batches=0)
    run.fit(ours, datamodule)
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = VisionLanguageModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert_equal(values(loaded), values(ours))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "clip"}, "task.module.objective is 'clip', allowed are"),
        ({"gpt": {"vocabulary": 99}}, "gpt.vocabulary is the data's: set task.data.vocabulary"),
        ({"gpt": {"layers": 9}}, "gpt has no field layers; allowed are"),
        ({"vit": {"patch": 3}}, "vit.patch is 3, which does not divide task.data.size 8"),
        ({"contrast": {"width": 0}}, "contrast.width is 0"),
        ({"contrast": {"temperature": 0.01}}, "0 < min_temperature <= temperature <= 1"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VisionLanguageModule(**{**SMALL, **changes})
