"""From a composed configuration to checked settings, before any process starts.

What the syncer, the network and the learners are given is built here once, so that a wrong value
is a ValueError with the setting's name, what was given and what is allowed.
"""

from __future__ import annotations

import dataclasses
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from dd_lightning.algorithm import CODECS, FRAGMENTERS, MERGE_RULES, check_outer, resolve
from dd_lightning.chaos.plan import FaultPlan, RunShape
from dd_lightning.launch import checks, data_parallel, simulated
from dd_lightning.launch.learner_kind import OVERRIDABLE, check_learner
from dd_lightning.launch.supervision import ENOUGH_RESTARTS
from dd_lightning.network.profiles import WanProfile
from dd_lightning.protocol.config import SyncerConfig, Timeouts
from dd_lightning.report.loggers import KINDS, check_loggers
from dd_lightning.report.objective import DEFAULT, check_objective
from dd_lightning.report.study_plan import StudyPlan
from dd_lightning.simulate.presence import Presence
from dd_lightning.simulate.step_time import StepTimes

TOP_KEYS = (
    "mode",
    "learners",
    "seed",
    "task",
    "algorithm",
    "network",
    "chaos",
    "launcher",
    "logger",
    "learner",
    "trainer",
    "budget",
    "timeouts",
    "evaluate",
    "checkpoint",
    "simulate",
    "study",
    "objective",
)
LAUNCHER_KEYS = (
    "name",
    "listen",
    "keys",
    "threads_per_process",
    "step_floor_s",
    "step_log",
    "max_restarts",
    "restart_after_s",
    "resume",
)
LAST = "last"  # launcher.resume: from the newest checkpoints
CSV = "csv"  # the learners' own logger; all others are written by the syncer's process
MAX_LOCAL_LEARNERS = 200  # each has a loopback address of its own, 127.0.1.1 to 127.0.1.200


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked experiment: `values` is the resolved configuration, plain and nested."""

    values: dict[str, Any]
    syncer: SyncerConfig
    network: WanProfile
    faults: FaultPlan

    @property
    def proxied(self) -> bool:
        """Whether learners reach the syncer through the proxy."""
        return self.network.needs_proxy or self.faults.needs_proxy

    @property
    def learner_ids(self) -> list[str]:
        """ "0" to "M-1"."""
        return [str(index) for index in range(self.values["learners"])]

    @property
    def max_restarts(self) -> int:
        """Of each process; `auto` is enough where the chaos plan kills, else none."""
        given = self.launcher["max_restarts"]
        if given != "auto":
            return given
        return ENOUGH_RESTARTS if self.faults.kills else 0

    @property
    def restart_after_s(self) -> float:
        """From the end of a process to its next start; in virtual time, until it is back."""
        if self.values["mode"] == "simulate":
            return Presence.from_config(self.values).restart_s
        return self.launcher["restart_after_s"]

    @property
    def loggers(self) -> dict[str, dict[str, Any]]:
        """Those that the syncer's process writes, with their settings."""
        return {name: own for name, own in self.values["logger"].items() if name != CSV}

    @property
    def resume(self) -> str | None:
        """`last` or a cut's id, where an existing run is gone on with."""
        return self.launcher.get("resume")

    @property
    def cut(self) -> str | None:
        """The cut's id, where the run goes on from one."""
        return None if self.resume == LAST else self.resume

    @property
    def launcher(self) -> dict[str, Any]:
        """`launcher.*`."""
        return self.values["launcher"]


def check(values: Mapping[str, Any]) -> Settings:
    """Settings from a resolved configuration.

    Raises:
        ValueError: one setting is wrong; the message is for the user.
    """
    values = dict(values)
    checks.known_keys(values, (*TOP_KEYS, "experiment"))
    values.pop("experiment", None)
    _check_mode(values)
    if data_parallel.is_chosen(values):
        values = data_parallel.check(values)
    for name in ("learners", "trainer.max_steps"):
        checks.integer(values, name, 1)
    checks.integer(values, "seed", 0)
    checks.integer(values, "budget.tokens", 1, none=True)
    checks.integer(values, "checkpoint.keep", 1)
    for name in ("evaluate.every_s", "checkpoint.every_s"):
        checks.seconds(values, name)
    _check_launcher(values)
    _check_learners(values)
    values["logger"] = _checked_loggers(values)
    _check_algorithm(data_parallel.protocol_settings(values))
    simulated.check(values)
    check_objective(values.get("objective", DEFAULT), StudyPlan.load(values.get("study")))
    network = WanProfile.from_config(values["network"])
    faults = FaultPlan.load(checks.get(values, "chaos"), run_shape(values))
    if data_parallel.is_chosen(values):
        data_parallel.check_faults(faults.kinds)
    proxied = network.needs_proxy or faults.needs_proxy
    settings = Settings(values, _syncer_config(values, proxied), network, faults)
    return _awaiting_restarts(settings)


def named(values: dict[str, Any], experiment: str | None) -> dict[str, Any]:
    """The values with the launched experiment's name where `logger.aim.experiment` gives none."""
    aim = (values["logger"] or {}).get("aim")
    if experiment is None or not isinstance(aim, dict) or aim.get("experiment") is not None:
        return values
    return {**values, "logger": {**values["logger"], "aim": {**aim, "experiment": experiment}}}


def run_shape(values: Mapping[str, Any]) -> RunShape:
    """What a fault plan must fit, from a resolved configuration."""
    algorithm, learners = data_parallel.protocol_settings(values), values["learners"]
    is_virtual, step_floor_s = values["mode"] == "simulate", values["launcher"]["step_floor_s"]
    if is_virtual:
        step_floor_s = StepTimes.from_config(values["simulate"]).least_s(learners)
    quorum = learners if algorithm["quorum"] == "all" else algorithm["quorum"]
    return RunShape(
        learners=tuple(str(index) for index in range(learners)),
        seed=values["seed"],
        max_steps=values["trainer"]["max_steps"],
        step_floor_s=step_floor_s,
        first_checkpoint_s=values["checkpoint"]["every_s"],
        guarded=quorum if algorithm["max_norm_ratio"] is not None else 0,
        virtual=is_virtual,
    )


def _awaiting_restarts(settings: Settings) -> Settings:
    """Where processes are started again, the run does not end while one may still come back."""
    given = settings.syncer.timeouts.rejoin
    needed = settings.restart_after_s + settings.syncer.timeouts.connect
    if not settings.max_restarts or given >= needed:
        return settings
    if given != Timeouts().rejoin:
        warnings.warn(
            f"timeouts.rejoin={given:g} has no effect where processes are started again: it is "
            f"launcher.restart_after_s + timeouts.connect = {needed:g} s.",
            stacklevel=3,
        )
    timeouts = replace(settings.syncer.timeouts, rejoin=needed)
    values = settings.values | {"timeouts": settings.values["timeouts"] | {"rejoin": needed}}
    return dataclasses.replace(
        settings, values=values, syncer=replace(settings.syncer, timeouts=timeouts)
    )


def learner_values(values: Mapping[str, Any], learner: str) -> dict[str, Any]:
    """The configuration with `learner.overrides` of this learner merged in."""
    overrides = checks.get(values, "learner.overrides") or {}
    own = {str(key): value for key, value in overrides.items()}.get(learner) or {}
    return _merged(values, own)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        nested = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if nested else value
    return merged


def _check_mode(values: Mapping[str, Any]) -> None:
    checks.choice(values, "mode", ["processes", "simulate"])


def _check_launcher(values: Mapping[str, Any]) -> None:
    checks.choice(values, "launcher.name", ["local"])
    checks.known_keys(values["launcher"], LAUNCHER_KEYS, "launcher.")
    checks.choice(values, "launcher.keys", [False, True])
    checks.integer(values, "launcher.threads_per_process", 1)
    if values["launcher"].get("max_restarts") != "auto":
        checks.integer(values, "launcher.max_restarts", 0, word="auto")
    checks.choice(values, "launcher.step_log", [False, True])
    _check_resume(values["launcher"].get("resume"))
    for name in ("launcher.step_floor_s", "launcher.restart_after_s"):
        checks.seconds(values, name, positive=False)
    host, port = parse_listen(checks.get(values, "launcher.listen"))
    if port:
        _check_port_free(host, port)


def _check_resume(resume: Any) -> None:
    if resume is not None and not (isinstance(resume, str) and resume.isidentifier()):
        raise ValueError(
            f"launcher.resume is {resume!r}; allowed: null, last, or the id of a cut, as c1 "
            "(`dd-lightning checkpoint` says it)."
        )


def parse_listen(listen: Any) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`.

    Raises:
        ValueError: it does not look like that, or the host is not a loopback address.
    """
    text = str(listen)
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(
            f"launcher.listen is {listen!r}; allowed: tcp://HOST:PORT, as tcp://127.0.0.1:0."
        )
    if not host.startswith("127."):
        raise ValueError(
            f"launcher.listen is {listen!r}; allowed: an address 127.x.x.x, since the launcher "
            "runs everything on this machine. For other hosts start `dd-lightning syncer` there."
        )
    return host, int(port)


def _check_port_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"launcher.listen is 'tcp://{host}:{port}', which cannot be listened on "
                f"({error.strerror}); allowed: a free port, or 0 for any."
            ) from error


def _check_learners(values: Mapping[str, Any]) -> None:
    if values["learners"] > MAX_LOCAL_LEARNERS:
        raise ValueError(
            f"learners is {values['learners']}; allowed: 1 to {MAX_LOCAL_LEARNERS} on one machine."
        )
    check_learner(values)
    overrides = checks.get(values, "learner.overrides") or {}
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"learner.overrides is {overrides!r}; allowed: null or a mapping by learner, as "
            "{1: {trainer: {precision: bf16-mixed}}}."
        )
    ids = [str(index) for index in range(values["learners"])]
    checks.known_keys(overrides, ids, "learner.overrides.")
    for key, own in overrides.items():
        if not isinstance(own, Mapping):
            raise ValueError(
                f"learner.overrides.{key} is {own!r}; allowed: a mapping of "
                f"{', '.join(OVERRIDABLE)} settings."
            )
        checks.known_keys(own, OVERRIDABLE, f"learner.overrides.{key}.")
        try:
            check_learner(learner_values(values, str(key)))
        except ValueError as error:
            raise ValueError(f"learner.overrides.{key}: {error}") from error


def _checked_loggers(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`logger` with the defaults of what is not given."""
    loggers = checks.get(values, "logger") or {}
    checks.known_keys(loggers, (CSV, *KINDS), "logger.")
    own = {CSV: loggers[CSV]} if CSV in loggers else {}
    if own:
        checks.known_keys(own[CSV], ("flush_logs_every_n_steps", "prefix"), "logger.csv.")
    return own | check_loggers({name: loggers[name] for name in loggers if name != CSV})


def _check_algorithm(algorithm: Mapping[str, Any]) -> None:
    for name, registry in (
        ("merge", MERGE_RULES),
        ("fragmentation", FRAGMENTERS),
        ("codec", CODECS),
    ):
        try:
            resolve(name, algorithm[name], registry)
        except ValueError as error:
            raise ValueError(f"algorithm.{error}") from error
    try:
        check_outer(algorithm["outer"])
    except ValueError as error:
        raise ValueError(f"algorithm.{error}") from error


def _syncer_config(values: Mapping[str, Any], proxied: bool) -> SyncerConfig:
    return SyncerConfig.load(
        {
            "algorithm": data_parallel.protocol_settings(values),
            "timeouts": values["timeouts"],
            "learners": values["learners"],
            "max_steps": values["trainer"]["max_steps"],
            "budget_tokens": values["budget"]["tokens"],
            "seed": values["seed"],
            "checkpoint_every_s": values["checkpoint"]["every_s"],
            "checkpoint_keep": values["checkpoint"]["keep"],
            "proxied": proxied,
        }
    )
