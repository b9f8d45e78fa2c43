"""Each task of the kit in a short simulated run: it learns, and its metrics reach the summary."""

import json

import pytest

from dd_lightning.report.own_metrics import learners_mean
from tests.named_pictures import write_named
from tests.pictures import write_pictures
from tests.simulated_runs import QUICK, simulate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_experts_share_the_load_and_the_loss_falls(tmp_path):
    simulate(
        tmp_path / "data", tmp_path / "run", "task=text_moe", "trainer.max_steps=120",
        "task.data.batch_size=4",
    )  # fmt: skip
    summary = summary_of(tmp_path / "run")
    assert summary["task"] == "text_moe"
    assert summary["loss"]["validation"] < 0.8 * summary["loss"]["initial"]
    metrics = summary["metrics"]
    shares = {k: v for k, v in metrics.items() if k.startswith("expert_share_b")}
    assert len(shares) == 2 * 4  # blocks, experts
    assert metrics["expert_share_min"] == pytest.approx(min(shares.values()))
    assert metrics["expert_share_max"] == pytest.approx(max(shares.values()))
    assert 0.02 < metrics["expert_share_min"] <= 0.25


@pytest.mark.parametrize("architecture", ["vit", "resnet"])
def test_classifiers_learn_pictures(tmp_path, architecture):
    pictures = write_pictures(tmp_path / "pictures")
    simulate(
        tmp_path / "data", tmp_path / "run", "task=vision", "trainer.max_steps=40", "learners=4",
        "task.data.source=folder", f"task.data.path={pictures}", "task.data.classes=4",
        f"task.module.architecture={architecture}", "task.data.num_shards=8",
        "trainer.limit_val_batches=1.0", "trainer.val_check_interval=40",
        "learner.validate_global=true", base=QUICK,
    )  # fmt: skip
    summary = summary_of(tmp_path / "run")
    assert summary["task"] == "vision" and summary["learners"] == 4
    logged = (tmp_path / "run" / "learners" / "0" / "csv" / "version_0" / "metrics.csv").read_text()
    assert {"val_loss", "global/val_loss", "global/accuracy"} <= {
        *logged.splitlines()[0].split(",")
    }
    assert summary["loss"]["validation"] < 0.95 * summary["loss"]["initial"]
    assert summary["metrics"]["accuracy"] > 0.6  # one in four by chance
    # running statistics are merged too: the global model is about as good as the learners
    own = learners_mean(tmp_path / "run", "accuracy")
    assert own is not None and abs(own - summary["metrics"]["accuracy"]) < 0.1


def test_learners_with_a_library_each_and_their_losses_by_library(tmp_path):
    """Non-IID: the groups' losses reach the summary; the split changes what is learned, and an
    empty slot is refused before anything starts."""
    common = ("learners=4", "trainer.max_steps=12", "task.data.group_losses=true",
              "task.data.validation_samples=96", "task.data.max_bytes=1000000")  # fmt: skip
    losses = []
    for split in ("iid", "group"):
        folder = tmp_path / split
        simulate(tmp_path / "data", folder, *common, f"task.data.split={split}")
        summary = summary_of(folder)
        by_group = {k: v for k, v in summary["metrics"].items() if k.startswith("validation_loss_")}
        names = {"reference", "stdlib", "torch", "lightning"}
        assert set(by_group) == {f"validation_loss_group_{name}" for name in names}
        assert min(by_group.values()) <= summary["loss"]["validation"] <= max(by_group.values())
        losses.append(by_group)
    assert losses[0] != losses[1]
    with pytest.raises(ValueError, match=r"leaves data slot .* with 0 training samples"):
        simulate(
            tmp_path / "data", tmp_path / "refused", *common,
            "task.data.split=dirichlet", "task.data.split_alpha=0.001",
        )  # fmt: skip


def test_pictures_and_names_find_each_other(tmp_path):
    urls = write_named(tmp_path / "named")
    simulate(
        tmp_path / "data", tmp_path / "run", "task=vision_language", "trainer.max_steps=60",
        "learners=4", "task.data.source=webdataset", f"task.data.path='{urls}'", "task.data.size=8",
        "task.data.num_shards=8", "task.module.objective=both", "task.module.vit.patch=4",
        "task.module.vit.width=16", "task.module.gpt.width=16", "task.module.gpt.depth=1",
        "task.data.batch_size=16", "task.module.optimizer.lr=8e-3", base=QUICK,
    )  # fmt: skip
    summary = summary_of(tmp_path / "run")
    assert summary["task"] == "vision_language" and summary["learners"] == 4
    assert summary["loss"]["validation"] < 0.8 * summary["loss"]["initial"]
    metrics = summary["metrics"]
    assert 8 <= metrics["retrieval_candidates"] <= 12  # names; one in so many by chance
    assert metrics["recall_at_1"] > 0.3 and metrics["recall_at_5"] > 0.8
    assert metrics["caption_bits_per_byte"] < 2.5  # 8 without anything learnt
