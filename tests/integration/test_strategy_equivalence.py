"""The strategy against plain Lightning, a reference DiLoCo loop, and the known recurrence."""

import threading

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.algorithm import balanced_fragments
from dd_lightning.protocol.config import SyncerConfig
from tests.trainers import (
    QUIET,
    Regression,
    StartTogether,
    assert_equal,
    loader,
    run_threads,
    values,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
ADDRESS = "tcp://127.0.0.1:1"


def config(learners, **algorithm):
    algorithm = {"preset": "diloco", **algorithm}
    return SyncerConfig.load({"algorithm": algorithm, "learners": learners})


def fit(module, data, steps, learner="0", callbacks=(), strategy=None, **options):
    strategy = strategy or DecoupledDiLoCoStrategy(ADDRESS, learner=learner)
    trainer = pl.Trainer(
        **QUIET, strategy=strategy, max_steps=steps, callbacks=list(callbacks), **options
    )
    trainer.fit(module, data)
    return trainer


class MergeAlone(pl.Callback):
    """θ ← Θ − (Θ − θ), Θ ← θ every `every` steps."""

    def __init__(self, every):
        self.every = every

    def on_train_start(self, trainer, module):
        self.theta = values(module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step % self.every == 0:
            for name, parameter in module.state_dict().items():
                self.theta[name] -= self.theta[name] - parameter
                parameter.copy_(self.theta[name])


@pytest.mark.parametrize("inner", ["auto", "single_device"])
def test_one_learner_is_a_plain_run_that_merges_with_itself(syncer, inner):
    syncer(config(1, sync_every=4, outer={"lr": 1.0, "momentum": 0.0}))
    ours, plain = Regression(1), Regression(1)
    torch.manual_seed(5)
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner="0", inner=inner)
    fit(ours, loader(shuffle=True), 22, strategy=strategy)
    random_after = torch.get_rng_state()
    torch.manual_seed(5)
    fit(plain, loader(shuffle=True), 22, strategy="auto", callbacks=[MergeAlone(4)])
    assert torch.equal(random_after, torch.get_rng_state())
    assert_equal(values(ours), values(plain))


@pytest.mark.parametrize("wait", ["never", "overlap"])
def test_no_round_due_is_plain_lightning(syncer, wait):
    running = syncer(config(1, sync_every=1000, wait=wait, merge="rda"))
    ours, plain = Regression(1), Regression(1)
    torch.manual_seed(5)
    fit(ours, loader(shuffle=True), 20)
    random_after = torch.get_rng_state()
    torch.manual_seed(5)
    fit(plain, loader(shuffle=True), 20, strategy="auto")
    assert torch.equal(random_after, torch.get_rng_state())
    assert_equal(values(ours), values(plain))
    (ledger,) = running.events("ledger")
    assert ledger["fragments"] == [{"processed": 80, "merged": 80, "lost": 0, "pending": 0}]


def reference(modules, loaders, steps, sync_every, fragments, overlap):
    """Streaming DiLoCo (P = 1, τ = 0: DiLoCo) of equal learners, in plain torch."""
    names = [name for name, _ in modules[0].named_parameters()]
    sizes = {name: parameter.numel() for name, parameter in modules[0].named_parameters()}
    parts = balanced_fragments(sizes, fragments)
    locals_ = [dict(module.named_parameters()) for module in modules]
    theta = {name: locals_[0][name].detach().clone() for name in names}
    outers = [
        torch.optim.SGD([theta[n] for n in part], lr=0.7, momentum=0.9, nesterov=True)
        for part in parts
    ]
    inners = [module.configure_optimizers() for module in modules]
    batches = [[b for _ in range(9) for b in data] for data in loaders]
    under_way, next_round = [], 1
    for step in range(1, steps + 1):
        for module, inner, data in zip(modules, inners, batches, strict=True):
            inner.zero_grad()
            module.training_step(data[step - 1], 0).backward()
            inner.step()
        while step * fragments >= next_round * sync_every:
            part = (next_round - 1) % fragments
            taken = [{n: local[n].detach().clone() for n in parts[part]} for local in locals_]
            under_way.append((step, part, taken))
            next_round += 1
        while under_way and step >= under_way[0][0] + overlap:
            _, part, taken = under_way.pop(0)
            for name in parts[part]:
                gradients = [(theta[name] - values[name]).double() for values in taken]
                theta[name].grad = (sum(gradients) / len(gradients)).float()
            outers[part].step()
            for local in locals_:
                for name in parts[part]:
                    local[name].data.copy_(theta[name])
    return theta


@pytest.mark.parametrize(
    ("fragments", "sync_every", "overlap"), [(1, 5, 0), (4, 8, 0), (4, 8, 1), (4, 2, 0)]
)
def test_equal_learners_are_bitwise_the_reference_loop(syncer, fragments, sync_every, overlap):
    learners, steps = 2, 32 + overlap
    running = syncer(
        config(
            learners, fragments=fragments, sync_every=sync_every, overlap=overlap,
            outer={"lr": 0.7, "momentum": 0.9},
        )
    )  # fmt: skip
    barrier = threading.Barrier(learners)
    ours = [Regression(7) for _ in range(learners)]

    def learner(index):
        def run():
            strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=str(index), data="none")
            fit(ours[index], loader(index), steps, str(index), [StartTogether(barrier)], strategy)

        return run

    run_threads(*(learner(index) for index in range(learners)))
    copies = [Regression(7) for _ in range(learners)]
    theta = reference(
        copies, [loader(i) for i in range(learners)], steps, sync_every, fragments, overlap
    )
    for mine, copy in zip(ours, copies, strict=True):
        assert_equal(values(mine), values(copy))
    count = 32 * fragments // sync_every
    merges = running.events("merge")[:count]
    assert [merge["round"] for merge in merges] == list(range(1, count + 1))
    assert all(len(merge["contributors"]) == learners for merge in merges)
    if overlap == 0 and fragments == 1 and len(running.events("merge")) == count:
        assert_equal(running.parameters(), theta)


class Ramp(pl.LightningModule):
    """Two scalars that start at 1 and lose 2 per step."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.a.item())
        return self.a + self.b

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0)


def test_streaming_recurrence(syncer):
    syncer(config(1, fragments=2, sync_every=6, outer={"lr": 2.0, "momentum": 0.0}))
    module = Ramp()
    fit(module, loader(), 10)
    assert module.seen == [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]
