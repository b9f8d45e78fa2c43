"""The arithmetic of Decoupled DiLoCo as pure functions on tensors: fragments, weights, outer
gradients, merge rules, grace window, codecs, outer optimizer, presets.

Knows torch only: no clock, socket, thread or Lightning (`algorithm.md` is the specification).
"""

from dd_lightning.algorithm.averaging import (
    DEFAULT_AVERAGE_PATTERN,
    average_rule_names,
    canonical_name,
)
from dd_lightning.algorithm.buffers import merge_buffers, running_pairs
from dd_lightning.algorithm.checks import check_choice, check_int, check_number, refuse
from dd_lightning.algorithm.codecs import (
    CODECS,
    BFloat16Codec,
    Codec,
    NoCodec,
    dtype_from_name,
    dtype_name,
)
from dd_lightning.algorithm.fragments import (
    FRAGMENTERS,
    Balanced,
    Fragmenter,
    Layer,
    Strided,
    TensorRuns,
    balanced_fragments,
    check_partition,
    layer_fragments,
    strided_fragments,
    tensor_fragments,
)
from dd_lightning.algorithm.grace import grace_window
from dd_lightning.algorithm.gradients import from_delta, outer_gradient, reanchored
from dd_lightning.algorithm.merge import (
    MERGE_RULES,
    Average,
    MergeRule,
    RadialDirectional,
    agreement,
    merge_fragment,
    radial_directional_average,
    weighted_average,
)
from dd_lightning.algorithm.outer import DEFAULT_OUTER, build_outer_optimizer, check_outer
from dd_lightning.algorithm.presets import PRESETS, preset, warn_few_merges
from dd_lightning.algorithm.registry import resolve
from dd_lightning.algorithm.weights import contribution_weight, token_weight

__all__ = [
    "CODECS",
    "DEFAULT_AVERAGE_PATTERN",
    "DEFAULT_OUTER",
    "FRAGMENTERS",
    "MERGE_RULES",
    "PRESETS",
    "Average",
    "BFloat16Codec",
    "Balanced",
    "Codec",
    "Fragmenter",
    "Layer",
    "MergeRule",
    "NoCodec",
    "RadialDirectional",
    "Strided",
    "TensorRuns",
    "agreement",
    "average_rule_names",
    "balanced_fragments",
    "build_outer_optimizer",
    "canonical_name",
    "check_choice",
    "check_int",
    "check_number",
    "check_outer",
    "check_partition",
    "contribution_weight",
    "dtype_from_name",
    "dtype_name",
    "from_delta",
    "grace_window",
    "layer_fragments",
    "merge_buffers",
    "merge_fragment",
    "outer_gradient",
    "preset",
    "radial_directional_average",
    "reanchored",
    "refuse",
    "resolve",
    "running_pairs",
    "strided_fragments",
    "tensor_fragments",
    "token_weight",
    "warn_few_merges",
    "weighted_average",
]
