"""The loggers that a run may have beside its tape: their settings, and opening them for a run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dd_lightning.report.observer import Event
from dd_lightning.report.run_description import hparams_of, tags_of
from dd_lightning.report.run_log import About, RunLog, Writer

EXPERIMENT = "dd_lightning"  # where nobody names it
Loggers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A logger: the package and the extra that brings it, its settings, and how it is made."""

    package: str
    extra: str
    defaults: Mapping[str, Any]
    make: Callable[[Mapping[str, Any]], Writer]


def _aim(options: Mapping[str, Any]) -> Writer:
    from dd_lightning.report.aim_writer import AimWriter

    return AimWriter(options["repo"], options["experiment"] or EXPERIMENT)


def _tensorboard(options: Mapping[str, Any]) -> Writer:
    from dd_lightning.report.tensorboard_writer import TensorBoardWriter

    return TensorBoardWriter()


def _wandb(options: Mapping[str, Any]) -> Writer:
    from dd_lightning.report.wandb_writer import WandbWriter

    return WandbWriter(options["project"])


KINDS = {
    "aim": Kind("aim", "aim", {"repo": ".", "experiment": None}, _aim),
    "tensorboard": Kind("tensorboard", "loggers", {}, _tensorboard),
    "wandb": Kind("wandb", "loggers", {"project": EXPERIMENT}, _wandb),
}


def check_loggers(loggers: Loggers) -> dict[str, dict[str, Any]]:
    """The settings with defaults for what is not given.

    Raises:
        ValueError: an unknown logger or setting, or a package is missing: it names the extra.
    """
    checked = {}
    for name, options in loggers.items():
        if name not in KINDS:
            raise ValueError(f"logger is {name!r}; allowed: {', '.join(KINDS)}.")
        kind = KINDS[name]
        if unknown := sorted(set(options or {}) - set(kind.defaults)):
            allowed = ", ".join(kind.defaults) or "no settings"
            raise ValueError(f"logger.{name}.{unknown[0]} is unknown; allowed: {allowed}.")
        if importlib.util.find_spec(kind.package) is None:
            raise ValueError(
                f"logger is {name!r}, whose package is missing; allowed: csv, or install it with "
                f"`pip install 'dd-lightning[{kind.extra}]'`."
            )
        checked[name] = {**kind.defaults, **(options or {})}
    return checked


def open_logs(
    loggers: Loggers,
    run_id: str,
    folder: Path,
    config: Mapping[str, Any],
    began_wall_s: float,
    past: Callable[[], Iterable[Event]] = tuple,
) -> list[RunLog]:
    """A log for each of `loggers` (as `check_loggers` gives them), each in its own thread."""
    logs = []
    for name, options in loggers.items():
        experiment = options.get("experiment") or options.get("project") or EXPERIMENT
        tags = tags_of(config, experiment)
        about = About(run_id, folder, began_wall_s, config, hparams_of(config), tags)
        make = KINDS[name].make
        log = RunLog(name, lambda make=make, own=options: make(own), about, past=past())
        logs.append(log)
    return logs


def close_logs(logs: Iterable[RunLog], timeout_s: float, **last: Any) -> list[str]:
    """Close all within `timeout_s` together; what was lost, in words."""
    until = time.monotonic() + timeout_s
    said = [log.close(max(0.0, until - time.monotonic()), **last) for log in logs]
    return [text for text in said if text is not None]
