"""The run's configuration, owned by the syncer and handed to every learner that joins.

All bounds on waiting stand in `Timeouts`, validated against each other; `dd-lightning doctor`
prints them. Nothing here starts anything: a wrong value is a ValueError before any process does.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from dd_lightning.algorithm.presets import PRESETS
from dd_lightning.algorithm.weights import WEIGHTS

APPLY_MODES = ("overwrite", "rebase", "mix")
GRACE_RULES = ("lateness", "paper", "none")
WAIT_MODES = ("never", "overlap")
LOST_QUORUM = ("degrade", "wait")
DEFAULT_AVERAGE_TENSORS = r"(^|\.)(lm_head|head|unembed|output)\.weight$"
DEFAULT_MIX_ALPHA = 0.5
LEAST_SILENCE_S = 1.0
MERGES_BELOW_WHICH_MOMENTUM_HURTS = 30


def _fail(name: str, value: object, allowed: str, fix: str = "") -> None:
    raise ValueError(f"{name} is {value!r}; allowed: {allowed}.{' ' + fix if fix else ''}")


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `algorithm.*`; every default is the `paper` preset's (`algorithm.md`)."""

    preset: str = "paper"  # where the values come from; shown, never computed with
    fragments: int = 24  # P
    fragmentation: str | dict[str, Any] = "balanced"  # name or {_target_: ...}
    sync_every: int = 24  # H, inner steps between two merges of a fragment
    overlap: int = 2  # tau, inner steps
    quorum: int | str = 1  # K, or "all" for every planned learner
    grace_rule: str = "lateness"
    grace_safety: float = 0.8  # gamma
    grace_cap: float | None = None  # in median steps; None: max(2, H/6)
    weights: str = "tokens"  # of contributions in a merge: tokens | uniform
    merge: str | dict[str, Any] = "rda"  # rda | average | {_target_: ...}
    apply: str = "overwrite"
    mix_alpha: float = 0.5  # share of local kept, under `apply: mix`
    wait: str = "never"
    average_tensors: str = DEFAULT_AVERAGE_TENSORS
    buffers: bool = True  # False keeps all buffers local
    outer: dict[str, Any] = msgspec.field(default_factory=lambda: {"lr": 0.7, "momentum": 0.9})
    codec: str | dict[str, Any] = "none"  # none | bf16 | {_target_: ...}
    max_in_flight: int | str = "auto"
    min_learners: int | str | None = None  # rounds start with so many training; all; None: K
    max_learners: int | None = None  # data slots; None: the planned learners, else 64
    on_lost_quorum: str = "degrade"
    max_norm_ratio: float | None = None  # the guard; None: off
    max_stale: int = 20  # merges behind after which a returning learner takes Θ at once

    def __post_init__(self) -> None:
        for name, least in (("fragments", 1), ("sync_every", 2), ("overlap", 0), ("max_stale", 1)):
            if getattr(self, name) < least:
                _fail(f"algorithm.{name}", getattr(self, name), f"an integer >= {least}")
        for name, allowed in (
            ("grace_rule", GRACE_RULES),
            ("apply", APPLY_MODES),
            ("wait", WAIT_MODES),
            ("on_lost_quorum", LOST_QUORUM),
            ("weights", WEIGHTS),
        ):
            if getattr(self, name) not in allowed:
                _fail(f"algorithm.{name}", getattr(self, name), " | ".join(allowed))
        if self.quorum != "all" and (not isinstance(self.quorum, int) or self.quorum < 1):
            _fail("algorithm.quorum", self.quorum, "an integer >= 1, or all")
        if not 0.0 <= self.mix_alpha <= 1.0:
            _fail("algorithm.mix_alpha", self.mix_alpha, "0 (overwrite) to 1 (keep local)")
        if not 0.0 < self.grace_safety <= 1.0:
            _fail("algorithm.grace_safety", self.grace_safety, "above 0 and at most 1")
        if self.grace_cap is not None and self.grace_cap < 0:
            _fail("algorithm.grace_cap", self.grace_cap, "steps >= 0, or null for max(2, H/6)")
        if self.max_in_flight != "auto" and (
            not isinstance(self.max_in_flight, int) or self.max_in_flight < 1
        ):
            _fail("algorithm.max_in_flight", self.max_in_flight, "an integer >= 1, or auto")
        if self.max_learners is not None and self.max_learners < 1:
            _fail("algorithm.max_learners", self.max_learners, "an integer >= 1, or null")
        least = self.min_learners
        if least is not None and least != "all" and (isinstance(least, str) or least < 1):
            _fail("algorithm.min_learners", least, "an integer >= 1, all, or null for the quorum")
        if self.max_norm_ratio is not None and self.max_norm_ratio <= 1:
            _fail("algorithm.max_norm_ratio", self.max_norm_ratio, "above 1, or null for no guard")
        try:
            re.compile(self.average_tensors)
        except re.error as error:
            _fail(
                "algorithm.average_tensors",
                self.average_tensors,
                "a regular expression",
                str(error),
            )

    def cautions(self) -> list[str]:
        """What is allowed but rarely wanted, or without effect: one sentence each."""
        said = []
        if self.sync_every < 2 * (self.overlap + 1):
            said.append(
                f"algorithm.sync_every={self.sync_every} is below 2·(overlap+1)="
                f"{2 * (self.overlap + 1)}: fragments will be stale when they are merged"
            )
        if self.fragments > 4 * self.sync_every:
            said.append(
                f"algorithm.fragments={self.fragments} is above 4·sync_every="
                f"{4 * self.sync_every}: more than four rounds would open in every step"
            )
        if self.apply != "mix" and self.mix_alpha not in (0.0, PRESETS["paper"]["mix_alpha"]):
            said.append(
                f"algorithm.mix_alpha={self.mix_alpha} has no effect under apply={self.apply}"
            )
        if self.grace_cap is not None and self.grace_rule == "none":
            said.append("algorithm.grace_cap has no effect under grace_rule=none")
        return said


class Timeouts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every bound on waiting, in seconds: heartbeat·3, silence <= lease < round < flush."""

    heartbeat: float = 2.0  # the comm thread reports at least this often
    silence: float = 2.0  # a learner that hears nothing at all for so long dials anew
    lease: float = 10.0  # without a report for so long a generation ends
    connect: float = 60.0  # a learner's first connection, and its first fragments
    start: float = 60.0  # rounds start with fewer than min_learners after this, with a warning
    pull_least: float = 2.0  # a pull is repeated after max(this, 4 median steps + RTT)
    round: float = 60.0  # a member that has not contributed is struck from the roster
    reanchor: float = 30.0  # a new epoch's first merges wait for the learners so long
    cut: float = 20.0  # a consistent cut holds back rounds at most so long
    finish: float = 60.0  # a straggler may train on so long after the last other is done
    flush: float = 90.0  # a finished learner waits so long for its last merges
    rejoin: float = 10.0  # a lost learner is expected back so long before the run may end
    donor: float = 15.0  # a transfer of inner state without progress goes to another donor
    resume: float = 120.0  # a resumed syncer waits so long for the first learner to come back
    shutdown: float = 3.0  # any role ends within this after SIGINT or SIGTERM, state written
    store: float = 5.0  # one attempt at the rendezvous store

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (0 < value < math.inf or (value == 0 and name == "rejoin")):  # NaN neither
                _fail(f"timeouts.{name}", value, "seconds above 0, not infinite")
        if self.silence < LEAST_SILENCE_S:
            _fail(
                "timeouts.silence",
                self.silence,
                f"at least {LEAST_SILENCE_S:g} (a sign of life comes twice a second)",
            )
        for low, high, factor in (
            ("silence", "lease", 1),
            ("heartbeat", "lease", 3),
            ("lease", "round", 1),
            ("reanchor", "round", 1),
            ("round", "flush", 1),
        ):
            if getattr(self, low) * factor > getattr(self, high):
                times = f"{factor}·" if factor > 1 else ""
                _fail(
                    f"timeouts.{high}",
                    getattr(self, high),
                    f"at least {times}timeouts.{low} = {factor * getattr(self, low)}",
                    f"Raise timeouts.{high} or lower timeouts.{low}.",
                )


class SyncerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the syncer needs, and that a learner gets from it.

    Raises ValueError (from `load` and the constructor) naming the setting, what was given and what
    is allowed.
    """

    algorithm: AlgorithmConfig = msgspec.field(default_factory=AlgorithmConfig)
    timeouts: Timeouts = msgspec.field(default_factory=Timeouts)
    learners: int | None = None  # planned; None: whoever comes
    max_steps: int | None = None  # inner steps each learner is planned to do, if known
    budget_tokens: int | None = None  # the run ends when so many have been merged
    seed: int = 0
    checkpoint_every_s: float = 30.0
    checkpoint_keep: int = 3
    insecure: bool = False  # allow plaintext off loopback
    advertise: str | None = None  # host that learners are told to dial instead of the store's
    max_message_mib: int = 2048  # a larger frame closes the connection
    run_id: str = ""
    proxied: bool = False  # learners must come through the launcher's proxy

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        for name in ("learners", "max_steps", "budget_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                _fail(name, value, "an integer >= 1, or null")
        if self.checkpoint_every_s <= 0 or self.checkpoint_keep < 1 or self.max_message_mib < 1:
            _fail(
                "checkpoint_every_s, checkpoint_keep, max_message_mib",
                (self.checkpoint_every_s, self.checkpoint_keep, self.max_message_mib),
                "all above 0",
            )
        for name in ("quorum", "min_learners"):
            if getattr(algorithm, name) == "all" and self.learners is None:
                _fail(
                    f"algorithm.{name}",
                    "all",
                    "an integer when `learners` is not given",
                    "Give the syncer learners=M.",
                )
        slots = self.num_data_slots
        if self.learners is not None and self.learners > slots:
            _fail("algorithm.max_learners", slots, f"at least learners = {self.learners}")
        most = self.learners or slots
        if self.quorum > most:
            _fail("algorithm.quorum", algorithm.quorum, f"1 to {most} (the learners), or all")
        if self.min_learners > most:
            _fail("algorithm.min_learners", self.min_learners, f"1 to {most} (the learners)")

    @property
    def quorum(self) -> int:
        """K as a number."""
        quorum = self.algorithm.quorum
        return self.learners or 1 if isinstance(quorum, str) else quorum

    @property
    def min_learners(self) -> int:
        """Learners that must be training before rounds start."""
        least = self.algorithm.min_learners
        if isinstance(least, str):
            return self.learners or 1
        return self.quorum if least is None else least

    @property
    def num_data_slots(self) -> int:
        """Data slots, fixed for the run: a learner beyond them is refused."""
        return self.algorithm.max_learners or self.learners or 64

    def cautions(self) -> list[str]:
        """Allowed but rarely wanted: one sentence each, to be shown as warnings."""
        said = self.algorithm.cautions()
        momentum = self.algorithm.outer.get("momentum", 0.0)
        merges = (self.max_steps or 0) / self.algorithm.sync_every
        is_high = isinstance(momentum, int | float) and momentum >= 0.8  # else: refused elsewhere
        if self.max_steps and merges < MERGES_BELOW_WHICH_MOMENTUM_HURTS and is_high:
            said.append(
                f"each fragment will see about {merges:.0f} merges, too few for outer momentum "
                f"{momentum} to pay off: algorithm=short_run (lr 0.7, momentum 0.3) suits it"
            )
        return said

    def warn(self) -> None:
        """Issue `cautions()` as warnings."""
        for sentence in self.cautions():
            warnings.warn(sentence, stacklevel=2)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `load` takes back (and JSON, YAML and msgpack take)."""
        return msgspec.to_builtins(self)

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> SyncerConfig:
        """From plain nested values; `algorithm.preset` names the preset the rest overrides."""
        values = dict(values)
        algorithm = _mapping("algorithm", values.get("algorithm"), "algorithm: {preset: short_run}")
        preset = algorithm.get("preset", "paper")
        if not isinstance(preset, str) or preset not in PRESETS:
            _fail("algorithm.preset", preset, " | ".join(PRESETS))
        outer = _mapping("algorithm.outer", algorithm.get("outer"), "outer: {lr: 0.7}")
        timeouts = _mapping("timeouts", values.get("timeouts"), "timeouts: {round: 60}")
        base = PRESETS[preset]
        values["algorithm"] = {**base, **algorithm, "preset": preset}
        if "_target_" not in outer:
            values["algorithm"]["outer"] = {**base["outer"], **outer}
        _refuse_unknown(cls, values, "")
        _refuse_unknown(AlgorithmConfig, values["algorithm"], "algorithm.")
        _refuse_unknown(Timeouts, timeouts, "timeouts.")
        if values.get("timeouts") is None:
            values.pop("timeouts", None)
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ValueError(_teach(str(error), values)) from error


def _mapping(name: str, value: Any, example: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        _fail(name, value, "a mapping of settings", f"For example {example}.")
    return dict(value or {})


def _refuse_unknown(struct: type[msgspec.Struct], values: Mapping[str, Any], prefix: str) -> None:
    for key in values:
        if key not in struct.__struct_fields__:
            near = difflib.get_close_matches(str(key), struct.__struct_fields__, n=1)
            hint = f" Did you mean {prefix}{near[0]}?" if near else ""
            raise ValueError(
                f"{prefix}{key} is not a setting; allowed: "
                f"{', '.join(struct.__struct_fields__)}.{hint}"
            )


def _teach(text: str, values: Mapping[str, Any]) -> str:
    """`Expected `int`, got `str` - at `$.algorithm.fragments`` with the setting's name first."""
    match = re.match(r"(.*) - at `\$\.?(.*)`$", text)
    if match is None:
        return text
    said, path = match.groups()
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else value
    if said.startswith("Expected"):
        return f"{path} is {value!r}; {said[0].lower()}{said[1:]}."
    return said
