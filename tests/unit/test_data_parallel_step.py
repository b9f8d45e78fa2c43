"""The step of M members in one Trainer against plain torch, bit for bit."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dd_lightning.simulate.data_parallel_member import Member
from dd_lightning.simulate.data_parallel_step import DataParallelStep, JobData
from dd_lightning.simulate.random_state import RandomState

pytestmark = pytest.mark.unit

MEMBERS, STEPS, CLIP, DROPOUT = 3, 6, 0.05, 0.2
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "log_every_n_steps": 1,
}


class Tiny(pl.LightningModule):
    """Dropout draws from the members' random states; BatchNorm keeps running statistics."""

    def __init__(self, as_mapping=False, dropout=DROPOUT):
        super().__init__()
        self.as_mapping = as_mapping
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout),
                                 nn.Linear(8, 1))  # fmt: skip

    def loss(self, batch):
        return self.net(batch[0]).sub(batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"loss": loss, "more": 1} if self.as_mapping else loss

    def validation_step(self, batch, batch_idx):
        """Every task has one."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(pl.LightningDataModule):
    """Batches of one member: two epochs are needed for all steps."""

    def __init__(self, index):
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(32, 4, generator=generator)
        self.samples = list(zip(inputs, torch.randn(32, 1, generator=generator), strict=True))
        self.transferred = 0

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=8)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.transferred += self.trainer.training
        return batch


def members(count=MEMBERS):
    made = []
    for index in range(count):
        pl.seed_everything(100 + index)
        made.append(Member(index, Data(index), RandomState.current()))
    return made


def fit(module, of, present, accumulate=1, steps=STEPS, clip=CLIP):
    """Train `module`; `present` gives the members of each step. Returns the Trainer."""
    plan = iter(present)
    trainer = pl.Trainer(
        strategy=DataParallelStep(of, lambda: next(plan)),
        callbacks=[Begin(of)],
        max_steps=steps,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        **QUIET,
    )
    trainer.fit(module, datamodule=JobData(of))
    return trainer


class Begin(pl.Callback):
    """What the run does when a fit begins."""

    def __init__(self, of):
        self.of = of

    def on_fit_start(self, trainer, pl_module):
        trainer.datamodule.begin()
        self.of[0].random.restore()  # what is drawn outside of a step is the first member's


def reference(module, of, present, accumulate=1):
    """The same in plain torch: mean of the members' gradients; the buffers of the first."""
    found = module.configure_optimizers()
    optimizer, schedule = found["optimizer"], found["lr_scheduler"]["scheduler"]
    batches = {member.index: endless(member.data) for member in of}
    module.train()
    for who in present:
        optimizer.zero_grad()
        for _ in range(accumulate):
            before = {name: buffer.clone() for name, buffer in module.named_buffers()}
            for index in [*who[1:], who[0]]:
                for name, buffer in module.named_buffers():
                    buffer.copy_(before[name])
                of[index].random.restore()
                loss = module.loss(next(batches[index])) / len(who)
                (loss / accumulate).backward()
                of[index].random = RandomState.current()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        schedule.step()


def endless(data):
    while True:
        yield from data.train_dataloader()


def fresh(**options):
    pl.seed_everything(7)
    return Tiny(**options)


ALL = [(0, 1, 2)] * STEPS
FEWER = [(0, 1, 2), (0, 1, 2), (0, 2), (2,), (1, 2), (0, 1, 2)]  # as an elastic job has them


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("present", [ALL, FEWER], ids=["all", "elastic"])
def test_a_job_s_parameters_buffers_and_counts_are_plain_torch_s(present, accumulate):
    module, plain = fresh(), fresh()
    of = members()
    trainer = fit(module, of, present, accumulate)
    reference(plain, members(), present, accumulate)
    assert trainer.global_step == STEPS
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    drawn = [accumulate * sum(index in who for who in present) for index in range(MEMBERS)]
    assert [member.data.transferred for member in of] == drawn


def test_one_member_is_plain_lightning_and_a_mapping_is_a_loss_too():
    module, plain = fresh(as_mapping=True, dropout=0.0), fresh(dropout=0.0)
    fit(module, members(1), [(0,)] * STEPS)
    trainer = pl.Trainer(max_steps=STEPS, gradient_clip_val=CLIP, **QUIET)
    trainer.fit(plain, DataLoader(Data(0).samples, batch_size=8), [])
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_members_draw_masks_of_their_own():
    def sums(seeds):
        of = members(2)
        for member, seed in zip(of, seeds, strict=True):
            pl.seed_everything(seed)
            member.random = RandomState.current()
        module = fresh()
        fit(module, of, [(0, 1)] * 2, steps=2)
        return sum(parameter.double().sum().item() for parameter in module.parameters())

    assert sums((1, 2)) == sums((1, 2))
    assert len({sums((1, 2)), sums((1, 3)), sums((3, 2))}) == 3


def test_the_mean_loss_of_a_step_and_its_tokens_are_counted_by_member():
    of, module = members(2), fresh(dropout=0.0)
    expected = [module.loss(next(iter(Data(k).train_dataloader()))).item() for k in (0, 1)]
    module = fresh(dropout=0.0)
    trainer = fit(module, of, [(0, 1)], steps=1)
    assert [member.mean_loss for member in of] == pytest.approx(expected)
    assert [member.tokens for member in of] == [8, 8]  # samples, where nobody counts tokens
    assert trainer.global_step == 1


def test_a_step_without_a_loss_is_refused_by_name():
    class Silent(Tiny):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ValueError, match="training_step returned NoneType without a loss"):
        fit(Silent(), members(2), [(0, 1)], steps=1)
