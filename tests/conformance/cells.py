"""The conformance table: one row per feature, one column per inner strategy.

A cell is tested (`test_conformance.py`) or has its reason in `LEFT_OUT`. To add an inner strategy,
add a column to `INNER` and say what is left out; `docs/lightning.md` holds the table as made here.
"""

from __future__ import annotations

import pytest
import torch

from tests.conformance import modules as m
from tests.conformance import observing as o
from tests.conformance.feature import Feature
from tests.conformance.group_runs import GROUPS
from tests.conformance.scenarios import SCENARIOS, Scenario
from tests.trainers import Regression

INNER = ("auto", "single_device", "ddp", "ddp_spawn", "fsdp", "fsdp2")
"""Columns. Of the groups learner 0 is one of two ranks, and learner 1 a single process."""

PICKLED = "What spawned ranks get is pickled, which cannot be done to a compiled LightningModule."
IN_THE_RANKS = (
    "What the test looks at stays in spawned ranks, which are `ddp`'s once they have started."
)

WRAPPED = "A module that FSDP1 has wrapped before is refused by a learner, in words."
IN_FORWARD = (
    "Lightning runs `training_step` within FSDP1's forward pass, where torch has no backward pass."
)

LEFT_OUT: dict[tuple[str, str], str] = {
    ("compile_module", "ddp_spawn"): PICKLED,
    ("several_fits", "ddp_spawn"): "Lightning: calling `trainer.fit()` twice on the same Trainer "
    "instance using a spawn-based strategy is not supported.",
    ("evaluation", "ddp_spawn"): "Lightning returns no predictions of spawned ranks.",
    ("nan_loss", "ddp_spawn"): IN_THE_RANKS,
    ("validate_global", "ddp_spawn"): IN_THE_RANKS,
    (
        "fp16_mixed",
        "fsdp",
    ): "Lightning's `FSDPPrecision` takes no scaler, and the one that it makes is for GPUs.",
    **{
        (name, inner): "Lightning: sharded models do not work with weight averaging."
        for name in ("weight_averaging", "averaged_end")
        for inner in ("fsdp", "fsdp2")
    },
    ("manual", "fsdp"): IN_FORWARD,
    ("several_optimizers", "fsdp"): IN_FORWARD,
    ("several_fits", "fsdp"): WRAPPED,
    ("evaluation", "fsdp"): WRAPPED,
    ("compile_module", "fsdp2"): "Lightning: using a compiled model is incompatible with "
    "`ModelParallelStrategy`; parts of it may be compiled.",
    ("fp16_mixed", "fsdp2"): "Lightning: the `ModelParallelStrategy` does not support "
    '`precision="16-mixed"`.',
}
"""(feature, inner): why there is no such cell."""

IN_MAKE_TEST = {
    "ddp": ("accumulate", "fp16_mixed", "batch_norm", "several_optimizers", "resume", "nan_loss"),
    "ddp_spawn": ("schedule_by_step", "early_stopping"),
    "fsdp": ("bf16_true", "clip_value", "limits"),
    "fsdp2": ("clip_norm", "bf16_mixed", "tied_weights", "adapters", "validate_global"),
}
"""Rows whose one cell of `make test` is not that of the first column."""


def merges_after_32_micro_batches(run):
    """4 micro-batches of 4 samples a step, 8 steps a round."""
    taken = [c for c in run.events("contribution") if c["verdict"] == "accepted"]
    tokens = 128 * run.ranks
    assert {(c["step"], c["steps"], c["tokens"]) for c in taken} == {
        (8, 8, tokens),
        (16, 8, tokens),
    }


def only_the_adapter_travels(run):
    """4 bytes of each of its 13 elements, in all fragments of one round each together."""
    (layout,) = run.events("layout")
    names = sorted(name for fragment in layout["fragments"] for name in fragment)
    assert names == ["down.weight", "up.bias", "up.weight"]
    assert {size for kind, size in run.uploaded if kind == "Contribution"} == {4 * (3 + 5 + 5)}


def one_matrix_travels(run):
    """Under its first name, once."""
    (layout,) = run.events("layout")
    assert layout["fragments"] == [["net.embed.weight"]]
    assert {size for kind, size in run.uploaded if kind == "Contribution"} == {4 * 7 * 4}


def named_as_without(run):
    """No trace of a wrapper in the layout."""
    (layout,) = run.events("layout")
    names = sorted(name for fragment in layout["fragments"] for name in fragment)
    assert names == sorted(name for name, _ in Regression().named_parameters())


def statistics_travel(run):
    """And the count of batches does not."""
    (layout,) = run.events("layout")
    names = {name for fragment in layout["fragments"] for name in fragment}
    assert {"net.1.running_mean", "net.1.running_var"} < names
    assert "net.1.num_batches_tracked" not in names


FEATURES = [
    Feature("precision_32", '`precision="32-true"`', options=o.always(precision="32-true")),
    Feature("bf16_mixed", '`precision="bf16-mixed"`', options=o.always(precision="bf16-mixed")),
    Feature("bf16_true", '`precision="bf16-true"`', options=o.always(precision="bf16-true")),
    Feature(
        "fp16_mixed",
        '`precision="16-mixed"`: steps that the scaler skips are not counted',
        m.Overflowing,
        o.with_scaler,
        batches=24,
        tokens=96,
        observe=o.scale_left,
        expected={"scale": 4.0 / 2**8},
    ),
    Feature(
        "accumulate",
        "`accumulate_grad_batches`",
        options=o.always(accumulate_grad_batches=4),
        batches=64,
        tokens=256,
        fragments=1,
        verify=merges_after_32_micro_batches,
    ),
    Feature("clip_norm", "`gradient_clip_val` (norm)", options=o.always(gradient_clip_val=0.1)),
    Feature(
        "clip_value",
        "`gradient_clip_val` (value)",
        options=o.always(gradient_clip_val=0.05, gradient_clip_algorithm="value"),
    ),
    Feature("manual", "manual optimization", m.Manual),
    Feature(
        "several_optimizers",
        "several optimizers, counted once per batch",
        m.TwoOptimizers,
        observe=o.global_step,
        expected={"global_step": 24},
    ),
    Feature(
        "compile_module",
        "`torch.compile` of the LightningModule",
        wrap=lambda module: torch.compile(module, backend="eager"),
        verify=named_as_without,
    ),
    Feature(
        "compile_inside",
        "`torch.compile` of a part of it",
        m.CompiledInside,
        verify=named_as_without,
    ),
    Feature(
        "schedule_by_step",
        "learning-rate schedule by step",
        m.ByStep,
        observe=o.learning_rate,
        expected={"lr": 0.05 / 2**3},
    ),
    Feature(
        "schedule_by_epoch",
        "learning-rate schedule by epoch",
        m.ByEpoch,
        batches=4,
        epochs=4,
        observe=o.learning_rate,
        expected={"lr": 0.05 / 2**4},
    ),
    Feature("activation_checkpoints", "gradient checkpointing", m.Checkpointed),
    Feature(
        "adapters",
        "frozen parameters and adapters: only what is trained travels",
        m.Adapted,
        fragments=1,
        verify=only_the_adapter_travels,
    ),
    Feature("tied_weights", "tied weights", m.TiedWeights, fragments=1, verify=one_matrix_travels),
    Feature(
        "batch_norm",
        "BatchNorm: running statistics are merged as a mixture",
        m.Normed,
        fragments=1,
        verify=statistics_travel,
    ),
    Feature("configure_model", "parameters made in `configure_model`", m.ConfiguredLate),
    Feature(
        "early_stopping",
        "`EarlyStopping`",
        m.Watched,
        o.stops_early,
        validates=True,
        learners=1,
        steps=8,
        tokens=32,
        observe=o.global_step,
        expected={"global_step": 8},
    ),
    Feature(
        "model_checkpoint",
        "`ModelCheckpoint`: files hold the weights after the merge",
        options=o.checkpoints,
        observe=o.saved,
        expected={
            "files": [f"epoch=0-step={step}.ckpt" for step in (12, 16, 4, 8)] + ["last.ckpt"]
        },
    ),
    Feature("weight_averaging", "`WeightAveraging`", options=o.averaging),
    Feature(
        "rate_monitor",
        "`LearningRateMonitor`",
        m.ByStep,
        o.monitors_rate,
        observe=o.rates_logged,
        expected={"count": 17},
    ),
    Feature(
        "rich_progress_bar",
        "`RichProgressBar`",
        options=o.progress_bar,
        observe=o.bar_at,
        expected={"done": 16},
    ),
    Feature(
        "fast_dev_run",
        "`fast_dev_run`",
        options=o.always(fast_dev_run=True),
        steps=1,
        tokens=4,
        observe=o.global_step,
        expected={"global_step": 1},
    ),
    Feature("overfit", "`overfit_batches`", options=o.always(overfit_batches=2), epochs=8),
    Feature(
        "limits",
        "`limit_train_batches`, `limit_val_batches`",
        options=o.always(limit_train_batches=8, limit_val_batches=1),
        validates=True,
        learners=1,
        epochs=2,
        observe=o.val_loss,
    ),
    Feature(
        "max_steps",
        "`max_steps`",
        options=o.always(max_steps=16, max_epochs=-1),
        batches=12,
        observe=o.global_step,
        expected={"global_step": 16},
    ),
    Feature(
        "validation",
        "validation within an epoch, after a sanity check",
        options=o.always(val_check_interval=3, limit_val_batches=2, num_sanity_val_steps=1),
        validates=True,
        learners=1,
        observe=o.val_loss,
    ),
    Feature(
        "model_with_loss",
        "a model of Hugging Face's calling convention: tokens are those of the attention mask",
        m.LanguageModel,
        data=m.sentences,
        tokens=16 * 16,
        fragments=1,
    ),
    Feature(
        "transformers",
        "GPT-2 of `transformers` in a LightningModule",
        m.PretrainedModel,
        data=m.sentences,
        tokens=16 * 16,
    ),
]


def cells(rows):
    """(row, inner, whether it is the row's cell in `make test`)."""
    chosen = {name: inner for inner, names in IN_MAKE_TEST.items() for name in names}
    for row in rows:
        for inner in INNER:
            if (row.name, inner) not in LEFT_OUT:
                yield row, inner, inner == chosen.get(row.name, INNER[0])


def parameters(rows):
    """The same for pytest. The start of the ranks counts as a test's time, too."""
    for row, inner, is_chosen in cells(rows):
        marks = [pytest.mark.filterwarnings(text) for text in row.ignore]
        marks += [] if is_chosen else [pytest.mark.slow]
        marks += [pytest.mark.timeout(300)] if inner in GROUPS else []
        yield pytest.param(row, inner, marks=marks, id=f"{row.name}-{inner}")


def table() -> str:
    """The table of `docs/lightning.md`: rows, columns, and notes on the cells left out."""
    notes: list[str] = []

    def cell(row: Feature | Scenario, inner: str) -> str:
        reason = LEFT_OUT.get((row.name, inner))
        if reason is None:
            return "yes"
        if reason not in notes:
            notes.append(reason)
        return f"no [{notes.index(reason) + 1}]"

    lines = ["| feature | " + " | ".join(INNER) + " |", "|---" * (1 + len(INNER)) + "|"]
    for row in (*FEATURES, *SCENARIOS):
        lines.append(f"| {row.title} | " + " | ".join(cell(row, inner) for inner in INNER) + " |")
    lines += [f"\n[{number}] {reason}" for number, reason in enumerate(notes, 1)]
    return "\n".join(lines)
