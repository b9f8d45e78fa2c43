"""Settings of `algorithm=data_parallel`, the baseline that is simulated beside our algorithms.

Here only the settings; `simulate/data_parallel.py` plays the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dd_lightning.algorithm import PRESETS
from dd_lightning.launch import checks
from dd_lightning.protocol.config import AlgorithmConfig

NAME = "data_parallel"
BESIDE = "diloco"  # the preset whose keys stand in the file too, so that sweeps may set them
OWN = ("preset", "elastic", "downscale_s", "upscale_s")
SHARED = ("max_learners",)  # keys of the other algorithms that mean the same here
NOT_MODELLED = ("poison", "corrupt")  # kinds of fault


@dataclass(frozen=True, slots=True)
class DataParallel:
    """`algorithm.*` of a data-parallel run.

    Args:
        elastic: a lost member costs `downscale_s` and the step in which it was lost; members that
            are back cost `upscale_s` together. Else all stand still until it is back and go on
            from the last checkpoint.
    """

    elastic: bool
    downscale_s: float
    upscale_s: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DataParallel:
        """From a checked configuration."""
        algorithm = values["algorithm"]
        return cls(algorithm["elastic"], algorithm["downscale_s"], algorithm["upscale_s"])


def is_chosen(values: Mapping[str, Any]) -> bool:
    """Whether the run is data-parallel."""
    algorithm = values.get("algorithm")
    return isinstance(algorithm, Mapping) and algorithm.get("preset") == NAME


def protocol_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """`algorithm.*` as the protocol's checks take it; a stand-in where there is no protocol."""
    if not is_chosen(values):
        return values["algorithm"]
    shared = {name: values["algorithm"][name] for name in SHARED}
    defaults = {"preset": BESIDE, "buffers": True, **PRESETS[BESIDE]}
    return defaults | shared


def check(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with only those keys of `algorithm` that mean something here.

    Raises:
        ValueError: a setting is wrong, or cannot be combined with data-parallel training.
    """
    algorithm = values["algorithm"]
    checks.known_keys(algorithm, (*OWN, *AlgorithmConfig.__struct_fields__), "algorithm.")
    if values["mode"] != "simulate":
        raise ValueError(
            "algorithm is 'data_parallel'; allowed: under mode=simulate, where it is the baseline. "
            "For real processes use Lightning's own: Trainer(strategy='ddp')."
        )
    checks.choice(values, "algorithm.elastic", [False, True])
    for name in ("downscale_s", "upscale_s"):
        checks.seconds(values, f"algorithm.{name}", positive=False)
    if values["learner"].get("overrides"):
        raise ValueError(
            f"learner.overrides is {values['learner']['overrides']!r}; allowed: null under "
            "algorithm=data_parallel, whose members make the same step of one model. Speeds differ "
            "by simulate.speeds."
        )
    if values["launcher"].get("resume") is not None:
        raise ValueError(
            f"launcher.resume is {values['launcher']['resume']!r}; allowed: null under "
            "algorithm=data_parallel. Run it again: the same seed gives the same run."
        )
    _warn(values)
    kept = {name: algorithm[name] for name in (*OWN, *SHARED)}
    return {**values, "algorithm": kept}


def check_faults(kinds: frozenset[str]) -> None:
    """Refuse kinds of fault that are not modelled; warn of those that do nothing here.

    Raises:
        ValueError: one that would harm a data-parallel run in a way that is not modelled.
    """
    if wrong := sorted(kinds & set(NOT_MODELLED)):
        raise ValueError(
            f"chaos has faults of kind {', '.join(wrong)}; allowed under algorithm=data_parallel: "
            "kill, pause, slow, partition, flap, bandwidth."
        )
    for kind in sorted(kinds & {"kill_syncer", "full_disk"}):
        warnings.warn(
            f"chaos: {kind} has no effect under algorithm=data_parallel, which has no syncer.",
            stacklevel=3,
        )


def _warn(values: Mapping[str, Any]) -> None:
    algorithm, defaults = values["algorithm"], protocol_settings(values)
    changed = [
        f"algorithm.{name}"
        for name in defaults
        if name != "preset" and algorithm.get(name, defaults[name]) != defaults[name]
    ]
    if changed:
        warnings.warn(
            f"{', '.join(changed)}: no effect under algorithm=data_parallel.", stacklevel=4
        )
    others = {
        "simulate.joins": bool(values["simulate"].get("joins")),
        "simulate.leaves": bool(values["simulate"].get("leaves")),
    }
    for name in (name for name, given in others.items() if given):
        warnings.warn(f"{name} has no effect under algorithm=data_parallel.", stacklevel=4)
