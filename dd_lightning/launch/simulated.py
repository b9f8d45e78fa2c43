"""Checks of `simulate.*` before a run, and of settings that mean nothing beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from dd_lightning.launch import checks
from dd_lightning.simulate.presence import Presence
from dd_lightning.simulate.step_time import StepTimes

KEYS = ("step_s", "distribution", "jitter", "speeds", "trace", "restart_s", "joins", "leaves")
CHOSEN = ("speeds", "trace", "joins", "leaves")  # null unless somebody asked for them
DRAWN = {"distribution": "constant", "jitter": 0}  # where no step time is drawn


def check(values: Mapping[str, Any]) -> None:
    """Refuse wrong settings of `simulate.*`; warn of those without effect.

    Raises:
        ValueError: one is wrong, or is not a setting.
    """
    given = values["simulate"]
    checks.known_keys(given, KEYS, "simulate.")
    if values["mode"] == "simulate":
        Presence.from_config(values)
        StepTimes.from_config(given)
    for sentence in _without_effect(values, given):
        warnings.warn(sentence, stacklevel=3)


def _without_effect(values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    asked = [name for name in CHOSEN if given[name]]
    asked += [name for name, value in DRAWN.items() if given[name] != value]
    if values["mode"] != "simulate":
        if asked:
            names = ", ".join(f"simulate.{name}" for name in asked)
            yield f"{names}: no effect under mode=processes, where steps take as long as they take."
        return
    step_s, floor_s = given["step_s"], values["launcher"]["step_floor_s"]
    if floor_s not in (0, step_s):  # equal ones deceive nobody, as in experiment=smoke
        yield (
            f"launcher.step_floor_s={floor_s:g} has no effect under mode=simulate: a step takes "
            f"simulate.step_s={step_s:g} s, or as its trace says."
        )
    if drawn := [name for name in asked if name in DRAWN and given["trace"]]:
        names = ", ".join(f"simulate.{name}" for name in drawn)
        yield f"{names}: no effect beside simulate.trace, which says how long each step takes."
    elif given["distribution"] != "constant" and not given["jitter"]:
        yield f"simulate.distribution={given['distribution']} has no effect at simulate.jitter=0."
    slots = max(values["learners"], values["algorithm"].get("max_learners") or 0)
    if given["speeds"] and len(given["speeds"]) > slots:
        yield (
            f"simulate.speeds has {len(given['speeds'])} entries for {slots} learners: those after "
            f"the first {slots} have no effect."
        )
