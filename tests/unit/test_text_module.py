"""GPTModule under a plain Trainer: learning rate, token counts, repeatability, logged names."""

import math

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from dd_lightning.tasks.text import GPTModule, OptimizerConfig

pytestmark = pytest.mark.unit

GPT = {"vocabulary": 32, "max_length": 16, "width": 16, "depth": 1, "heads": 2}


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Counting sequences: the next token is the last one plus one, so there is much to learn."""
    starts = torch.arange(count * 4).view(count, 4, 1)
    ids = (starts * 5 + torch.arange(17)) % 32
    return [{"input_ids": x[:, :-1], "labels": x[:, 1:]} for x in ids]


def fit(steps: int = 40, seed: int = 0, folder=None, **optimizer) -> tuple[GPTModule, pl.Trainer]:
    pl.seed_everything(seed, verbose=False)
    module = GPTModule(GPT, {"lr": 1e-2, "warmup_steps": 5, **optimizer})
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=folder is not None,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(batches(40)[:steps], batch_size=None)
    trainer.fit(module, data, data)
    return module, trainer


def test_training_lowers_the_loss_of_unseen_batches():
    torch.manual_seed(0)
    before = GPTModule(GPT).loss(batches(50)[-1])
    module, _ = fit()
    assert module.loss(batches(50)[-1]) < 0.5 * before


def test_two_runs_of_one_seed_are_bitwise_equal():
    (a, _), (b, _) = fit(steps=8), fit(steps=8)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_loss_is_cross_entropy_per_token():
    torch.manual_seed(0)
    module, batch = GPTModule(GPT), batches(1)[0]
    log_p = F.log_softmax(module(batch["input_ids"]), -1)
    expected = -log_p.gather(-1, batch["labels"][..., None]).sum() / (4 * 16)
    torch.testing.assert_close(module.loss(batch), expected)


def test_tokens_of_a_batch_are_its_targets():
    assert GPTModule.count_tokens(batches(1)[0]) == 4 * 16


def test_validation_is_the_mean_over_tokens_with_an_unequal_last_batch():
    torch.manual_seed(0)
    module = GPTModule(GPT)
    data = batches(3)
    data[-1] = {name: tensor[:1] for name, tensor in data[-1].items()}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    (metrics,) = trainer.validate(module, DataLoader(data, batch_size=None), verbose=False)
    joined = {name: torch.cat([batch[name] for batch in data]) for name in data[0]}
    expected = module.loss(joined).item()
    assert metrics["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-5)


def test_weight_decay_is_for_matrices_only():
    module, trainer = fit(steps=1, weight_decay=0.3)
    groups = trainer.optimizers[0].param_groups
    assert {p.ndim >= 2: g["weight_decay"] for g in groups for p in g["params"]} == {
        True: 0.3,
        False: 0.0,
    }
    assert sum(len(g["params"]) for g in groups) == len(list(module.parameters()))


def test_cosine_warms_up_and_ends_at_its_ratio():
    config = OptimizerConfig(warmup_steps=4, final_ratio=0.2)
    factors = [config.factor(step, 24) for step in range(40)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[14] == pytest.approx(0.6)
    assert factors[24:] == pytest.approx([0.2] * 16)


def test_constant_stays_after_warm_up():
    config = OptimizerConfig(warmup_steps=2, schedule="constant")
    assert [config.factor(step, 0) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_schedule_follows_the_trainer_per_step():
    _, trainer = fit(steps=10, warmup_steps=0, final_ratio=0.1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)


def test_cosine_without_an_end_is_refused():
    with pytest.raises(ValueError, match="schedule=cosine needs to know where it ends"):
        fit(steps=-1)


@pytest.mark.parametrize(
    ("gpt", "optimizer", "message"),
    [
        ({"breadth": 3}, {}, "gpt has no field breadth; allowed are"),
        ({}, {"lr": 0}, "optimizer.lr is 0"),
        ({}, {"schedule": "linear"}, "'linear', allowed are"),
        ({}, {"beta2": 1.0}, "optimizer.beta2 is 1.0"),
        ({}, {"warmup_steps": -1}, "optimizer.warmup_steps is -1"),
        ({}, {"final_ratio": 2}, "optimizer.final_ratio is 2"),
    ],
)
def test_wrong_settings_are_refused(gpt, optimizer, message):
    with pytest.raises(ValueError, match=message):
        GPTModule({**GPT, **gpt}, optimizer)


def test_a_checkpoint_loads_without_unpickling(tmp_path):
    module, trainer = fit(steps=2, folder=tmp_path)
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    loaded = GPTModule.load_from_checkpoint(path, weights_only=True)
    assert loaded.model.config == module.model.config
    assert loaded.optimizer_config == module.optimizer_config
    batch = batches(1)[0]
    assert torch.equal(loaded.loss(batch), module.loss(batch))
