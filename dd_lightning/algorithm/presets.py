"""Presets of the algorithm's settings, as plain data with the keys of the `algorithm` config group.

`quorum: all` means K = M. None means: `grace_cap` max(2, H/6) median steps, `min_learners` K,
`max_learners` the planned number of learners, `max_norm_ratio` no guard.
"""

import copy
import warnings
from typing import Any

from dd_lightning.algorithm.averaging import DEFAULT_AVERAGE_PATTERN
from dd_lightning.algorithm.checks import check_choice, check_int, check_number

_PAPER: dict[str, Any] = {
    "fragments": 24,
    "fragmentation": "balanced",
    "sync_every": 24,
    "overlap": 2,
    "quorum": 1,
    "grace_rule": "lateness",
    "weights": "tokens",
    "merge": "rda",
    "apply": "overwrite",
    "mix_alpha": 0.5,
    "wait": "never",
    "average_tensors": DEFAULT_AVERAGE_PATTERN,
    "grace_safety": 0.8,
    "grace_cap": None,
    "outer": {"lr": 0.7, "momentum": 0.9},
    "codec": "none",
    "max_in_flight": "auto",
    "min_learners": None,
    "max_learners": None,
    "on_lost_quorum": "degrade",
    "max_norm_ratio": None,
    "max_stale": 20,
}

# everyone contributes before a merge, so there is nobody left to grant a grace window to
_SYNCHRONOUS = {"quorum": "all", "grace_rule": "none", "merge": "average", "wait": "overlap"}

PRESETS: dict[str, dict[str, Any]] = {
    # long runs
    "paper": _PAPER,
    # few merges per fragment: a gain lr / (1 - mu) far above 1 has no time to pay off
    "short_run": _PAPER
    | {"fragments": 12, "sync_every": 12, "outer": {"lr": 0.7, "momentum": 0.3}},
    # the synchronous ancestor: everyone waits, the whole model at once
    "diloco": _PAPER | _SYNCHRONOUS | {"fragments": 1, "overlap": 0},
    # P, H and tau of `paper`, so that a comparison shows quorum, merge rule and waiting only
    "streaming": _PAPER | _SYNCHRONOUS,
}

_FEW_MERGES = 30
_HIGH_MOMENTUM = 0.8


def preset(name: str) -> dict[str, Any]:
    """Return a copy of a preset that the caller may change.

    Raises:
        ValueError: an unknown name.
    """
    return copy.deepcopy(PRESETS[check_choice("algorithm", name, PRESETS)])


def warn_few_merges(max_steps: int, sync_every: int, momentum: float) -> bool:
    """Warn, and return True, where the outer momentum has too few merges to pay off.

    Args:
        max_steps: inner steps that a learner is planned to do.
        sync_every: H, inner steps between merges of one fragment.
        momentum: of the outer optimizer.

    Raises:
        ValueError: a count or momentum out of range.
    """
    merges = check_int("max_steps", max_steps, 0) // check_int("sync_every", sync_every, 1)
    high = check_number("outer.momentum", momentum, 0, below=1) >= _HIGH_MOMENTUM
    if not high or merges >= _FEW_MERGES:
        return False
    warnings.warn(
        f"outer.momentum {momentum:g} with about {merges} merges per fragment "
        f"({max_steps} steps, sync_every {sync_every}): fewer than {_FEW_MERGES} are too few for "
        "it to pay off. Use algorithm=short_run, or train longer.",
        stacklevel=2,
    )
    return True
