"""The outer optimizer: any of torch.optim, by default SGD with Nesterov momentum.

`theta <- theta - lr * (delta + mu * b)`, `b <- mu * b + delta`, as `torch.optim.SGD` computes it
with delta in `.grad`; with lr 1 and momentum 0 theta becomes exactly theta - delta.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dd_lightning.algorithm.checks import check_number, refuse
from dd_lightning.algorithm.registry import build, import_class

DEFAULT_OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9}


def build_outer_optimizer(
    parameters: Iterable[nn.Parameter], spec: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """Return the outer optimizer of a fragment (its state is then per fragment).

    Args:
        parameters: Theta of the fragment.
        spec: `{lr, momentum}` for SGD, Nesterov where momentum > 0; a missing one takes its
            default (0.7, 0.9). Or `{_target_: torch.optim.Adam, lr: ...}`, other keys being
            arguments of that optimizer.

    Raises:
        ValueError: unknown keys, lr <= 0, momentum outside [0, 1), or no such optimizer.
    """
    settings = dict(DEFAULT_OUTER if spec is None else spec)
    _check_ranges(settings)
    if "_target_" not in settings:
        return _default_sgd(parameters, settings)
    path = settings.pop("_target_")
    cls = import_class("outer._target_", path)
    if not issubclass(cls, torch.optim.Optimizer):
        raise refuse("outer._target_", path, "a class of torch.optim.Optimizer")
    return build("outer", cls, settings, list(parameters))


def check_outer(spec: Mapping[str, Any] | None) -> None:
    """Raise the ValueError of `build_outer_optimizer`, before there are any parameters."""
    build_outer_optimizer([nn.Parameter(torch.zeros(1))], spec)


def _default_sgd(
    parameters: Iterable[nn.Parameter], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    unknown = sorted(str(key) for key in set(settings) - set(DEFAULT_OUTER))
    if unknown:
        fix = "For another optimizer or more arguments, add _target_: torch.optim.NAME."
        raise refuse("outer", unknown, "the keys " + ", ".join(DEFAULT_OUTER), fix)
    settings = DEFAULT_OUTER | settings
    momentum = float(settings["momentum"])
    return torch.optim.SGD(
        list(parameters), lr=float(settings["lr"]), momentum=momentum, nesterov=momentum > 0
    )


def _check_ranges(settings: Mapping[str, Any]) -> None:
    if "lr" in settings:
        check_number("outer.lr", settings["lr"], above=0, fix="Plain averaging is lr 1.")
    if "momentum" in settings:
        fix = "Use 0 for none; short runs do better with 0.3 than with 0.9."
        check_number("outer.momentum", settings["momentum"], 0, below=1, fix=fix)
