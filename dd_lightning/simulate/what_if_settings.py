"""The settings that a replay may be asked to change, and the run's configuration with them.

Only what the syncer decides about contributions that have arrived: everything else would change
what learners did and when, which a replay takes from the tape.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

MERGE, OUTER, QUORUM = "algorithm.merge", "algorithm.outer", "algorithm.quorum"
WEIGHTS = "algorithm.weights"
ALLOWED = f"{MERGE}, {WEIGHTS}, {OUTER}.<key>, {QUORUM}"


def read_set(text: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as YAML.

    Raises:
        ValueError: no such form, or a key that a what-if cannot change.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set is {text!r}; allowed: KEY=VALUE, KEY one of {ALLOWED}.")
    if key not in (MERGE, WEIGHTS, QUORUM) and not key.startswith(f"{OUTER}."):
        raise ValueError(
            f"--set is {text!r}; allowed keys: {ALLOWED}. Learners do what they did on the tape, "
            "so only what the syncer makes of their contributions can be changed."
        )
    return key, yaml.safe_load(value)


def read_outer(text: str) -> dict[str, Any]:
    """`lr=1.0,momentum=0`, or an optimizer's class before it: `torch.optim.Adam,lr=0.01`.

    Raises:
        ValueError: neither.
    """
    first, *rest = text.split(",")
    spec: dict[str, Any] = {}
    if "=" not in first:
        spec["_target_"] = first if "." in first else f"torch.optim.{first}"
    else:
        rest = [first, *rest]
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"--outer is {text!r}; allowed: lr=1.0,momentum=0, or torch.optim.Adam,lr=0.01."
            )
        spec[key.strip()] = yaml.safe_load(value)
    return spec


def changed(config: Mapping[str, Any], sets: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The configuration with these settings; values are checked by `launch.settings.check`."""
    values = copy.deepcopy(dict(config))
    algorithm = values["algorithm"]
    for key, value in sets:
        if key.startswith(f"{OUTER}."):
            algorithm["outer"] = {**algorithm["outer"], key.removeprefix(f"{OUTER}."): value}
        else:
            algorithm[key.removeprefix("algorithm.")] = value
    return values
