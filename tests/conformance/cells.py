"""The conformance table: one row per feature, one column per inner strategy.

A cell is tested (`test_conformance.py`) or has its reason in `LEFT_OUT`. To add an inner strategy,
add a column to `INNER` and say what is left out; `docs/lightning.md` holds the table as made here.
"""

from __future__ import annotations

import torch

from tests.conformance import modules as m
from tests.conformance import observing as o
from tests.conformance.feature import Feature
from tests.trainers import Regression

INNER = ("auto", "single_device")
"""Columns; the first one that a row has is its cell in `make test`."""

LEFT_OUT: dict[tuple[str, str], str] = {}
"""(feature, inner): why there is no such cell."""


def merges_after_32_micro_batches(run):
    """4 micro-batches of 4 samples a step, 8 steps a round."""
    taken = [c for c in run.events("contribution") if c["verdict"] == "accepted"]
    assert {(c["step"], c["steps"], c["tokens"]) for c in taken} == {(8, 8, 128), (16, 8, 128)}


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


UNORDERED = "ignore:Detected call of `lr_scheduler.step\\(\\)` before"

FEATURES = [
    Feature("precision_32", 'precision="32-true"', options=o.always(precision="32-true")),
    Feature("bf16_mixed", 'precision="bf16-mixed"', options=o.always(precision="bf16-mixed")),
    Feature("bf16_true", 'precision="bf16-true"', options=o.always(precision="bf16-true")),
    Feature(
        "fp16_mixed",
        'precision="16-mixed": steps that the scaler skips are not counted',
        m.Overflowing,
        o.with_scaler,
        batches=24,
        tokens=96,
        observe=o.scale_left,
        expected={"scale": 4.0 / 2**8},
    ),
    Feature(
        "accumulate",
        "accumulate_grad_batches",
        options=o.always(accumulate_grad_batches=4),
        batches=64,
        tokens=256,
        fragments=1,
        verify=merges_after_32_micro_batches,
    ),
    Feature("clip_norm", "gradient_clip_val (norm)", options=o.always(gradient_clip_val=0.1)),
    Feature(
        "clip_value",
        "gradient_clip_val (value)",
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
        "torch.compile of the LightningModule",
        wrap=lambda module: torch.compile(module, backend="eager"),
        verify=named_as_without,
    ),
    Feature(
        "compile_inside",
        "torch.compile of a part of it",
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
    Feature("configure_model", "parameters made in configure_model", m.ConfiguredLate),
]
