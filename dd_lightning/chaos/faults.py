"""One fault: what fails, whose, when and how; every kind there is, and the checks of its settings.

Nothing is injected here. Settings are those of the group `chaos`, checked before anything starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dd_lightning.algorithm.checks import check_choice, check_int, check_number, refuse

SYNCER = "syncer"
LONGEST_S = 3600.0  # of a pause, a cut, a collapse
POISONS = ("nan", "huge")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Args:
        inside: carried out in the learner's process at its step; else by the launcher.
        signal: as `inside` at a step, but by pid at a time.
        network: carried out by the proxy.
        options: its own settings with their defaults; None: must not be given, or chosen among.
    """

    words: str
    inside: bool = False
    signal: bool = False
    network: bool = False
    of_syncer: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kill": Kind("SIGKILL", inside=True, signal=True),
        "pause": Kind("SIGSTOP, later SIGCONT", inside=True, signal=True, options={"seconds": 5}),
        "slow": Kind("steps take longer", inside=True, options={"seconds": 5, "factor": 4}),
        "poison": Kind("parameters diverge", inside=True, options={"values": "nan"}),
        "partition": Kind("path cut", network=True, options={"seconds": 5}),
        "flap": Kind(
            "path cut again and again",
            network=True,
            options={"seconds": 0.5, "times": 5, "every_s": 1.5},
        ),
        "bandwidth": Kind("link collapses", network=True, options={"seconds": 5, "share": 0.001}),
        "corrupt": Kind("bytes flipped", network=True, options={"seconds": 2, "flips": None}),
        "kill_syncer": Kind("SIGKILL", of_syncer=True),
        "full_disk": Kind(
            "no space for checkpoints", of_syncer=True, options={"seconds": 5, "size_mib": 64}
        ),
    }
)
WHEN = ("target", "at_learner", "at_step", "at_s")


def _seconds(name: str, value: object) -> float:
    return check_number(name, value, maximum=LONGEST_S, above=0.0)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "seconds": _seconds,
    "every_s": _seconds,
    "factor": lambda name, value: check_number(name, value, above=1.0, maximum=1000.0),
    # Hydra reads chaos.values=nan as the number
    "values": lambda name, value: check_choice(name, "nan" if value != value else value, POISONS),
    "times": lambda name, value: check_int(name, value, 1, 1000),
    "share": lambda name, value: check_number(name, value, above=0.0, below=1.0),
    "flips": lambda name, value: None if value is None else check_int(name, value, 1),
    "size_mib": lambda name, value: check_int(name, value, 1),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault.

    Args:
        number: its name in the files of a run; 0 is the first of the plan.
        target: a learner's id, or "syncer".
        at_step: of `at_learner`, counted as its Trainer counts optimizer steps; or
        at_s: seconds since the run's start; or
        poisson: mean seconds between faults of the process that drew this one.
        options: of its kind, all of them.
    """

    number: int
    kind: str
    target: str
    at_step: int | None = None
    at_learner: str | None = None
    at_s: float | None = None
    poisson: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The process it befalls, as the launcher calls it."""
        return SYNCER if self.target == SYNCER else f"learner {self.target}"

    @property
    def planned(self) -> dict[str, Any]:
        """For the tape: {"step": n} (of which `learner`) | {"t_s": s} | {"poisson": mean}."""
        if self.at_step is not None:
            other = {} if self.at_learner == self.target else {"learner": self.at_learner}
            return {"step": self.at_step, **other}
        return {"t_s": self.at_s} if self.at_s is not None else {"poisson": self.poisson}

    @property
    def lasts_s(self) -> float | None:
        """How long it goes on; None: a moment, or until what it did has healed."""
        if self.kind == "flap":
            return (self.options["times"] - 1) * self.options["every_s"] + self.options["seconds"]
        return self.options.get("seconds")

    def describe(self) -> str:
        """In words, for the user."""
        if self.at_step is not None:
            whose = "its" if self.at_learner == self.target else f"learner {self.at_learner}'s"
            when = f"at {whose} step {self.at_step}"
        elif self.at_s is not None:
            when = f"at {self.at_s:g} s"
        else:
            when = f"drawn with a mean of {self.poisson:.1f} s"
        given = "".join(f", {name} {value:g}" if isinstance(value, int | float) else
                        f", {name} {value}" for name, value in self.options.items()
                        if value is not None)  # fmt: skip
        return f"{self.kind} of {self.role} {when}{given}"


def read_fault(
    number: int, values: Mapping[str, Any], learners: Collection[str], where: str
) -> Fault:
    """A fault at a step or a time, from its settings.

    Raises:
        ValueError: a key or value that is not allowed; it is called by `where` and its key.
    """
    kind, target, options = read_kind(values, learners, where, WHEN)
    assert target is not None  # WHEN is allowed, so a target is asked for
    step, at_s, whose = (values.get(key) for key in ("at_step", "at_s", "at_learner"))
    if (step is None) == (at_s is None):
        given = {"at_step": step, "at_s": at_s}
        raise refuse(f"{where}at_step and at_s", given, "one of the two, the other null")
    if at_s is not None:
        if whose is not None:
            raise refuse(f"{where}at_learner", whose, "null, where at_s is given")
        return Fault(number, kind, target, at_s=_seconds(f"{where}at_s", at_s), options=options)
    step = check_int(f"{where}at_step", step, 1)
    own = target if target != SYNCER else sorted(learners, key=int)[0]
    whose = _learner(f"{where}at_learner", own if whose is None else whose, learners)
    return Fault(number, kind, target, at_step=step, at_learner=whose, options=options)


def read_kind(
    values: Mapping[str, Any], learners: Collection[str], where: str, others: Collection[str]
) -> tuple[str, str | None, dict[str, Any]]:
    """Kind, target and options; without a target (a learner drawn later) None.

    Args:
        others: keys beside `kind` and the kind's options that mean something.

    Raises:
        ValueError: as `read_fault`.
    """
    if not isinstance(values, Mapping):
        raise refuse(where.rstrip("."), values, "a mapping, as {kind: kill, target: 1}")
    name = check_choice(f"{where}kind", values.get("kind", ""), KINDS)
    kind = KINDS[name]
    known_keys(values, ("kind", *others, *kind.options), where)
    options = {
        key: _CHECKS[key](f"{where}{key}", default if values.get(key) is None else values[key])
        for key, default in kind.options.items()
    }
    if name == "flap" and options["every_s"] <= options["seconds"]:
        raise refuse(f"{where}every_s", options["every_s"], f"above seconds={options['seconds']:g}")
    target = values.get("target")
    if kind.of_syncer:
        if target not in (None, SYNCER):
            raise refuse(f"{where}target", target, f"null or syncer under kind={name}")
        return name, SYNCER, options
    if target is None and "at_step" not in others:
        return name, None, options
    return name, _learner(f"{where}target", target, learners), options


def _learner(name: str, value: object, learners: Collection[str]) -> str:
    if isinstance(value, bool) or str(value) not in learners:
        raise refuse(name, value, f"a learner of the run: {', '.join(learners)}")
    return str(value)


def known_keys(given: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    """Refuse a key that means nothing, with the nearest one that does."""
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), list(allowed), n=1)
            hint = f" Did you mean {where}{near[0]}?" if near else ""
            raise ValueError(
                f"{where}{key} is {given[key]!r}, but it is not a setting here; "
                f"allowed: {', '.join(allowed)}.{hint}"
            )
