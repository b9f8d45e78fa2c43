"""The fault plan of a run, from the settings `chaos`: checked as a whole before anything starts.

Three forms, which may not be mixed: one fault (`chaos.kind` and its settings), a list of them
(`chaos.faults`), or a Poisson process (`chaos.poisson`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from dd_lightning.algorithm.checks import check_choice, check_number, refuse
from dd_lightning.chaos.faults import KINDS, SYNCER, Fault, known_keys, read_fault
from dd_lightning.chaos.guard import NOT_BEFORE, Guard
from dd_lightning.chaos.poisson import PoissonPlan, read_poisson

KEYS = ("name", "seed", "not_before", "min_left_s", "faults", "poisson")
CAP_SYS_ADMIN = 21
GUARD_CONTRIBUTIONS = 3  # of a round, before `algorithm.max_norm_ratio` refuses any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What a plan must fit.

    Args:
        step_floor_s: no step is shorter.
        first_checkpoint_s: about when the syncer's first checkpoint is due.
        guarded: the rounds' quorum, where `algorithm.max_norm_ratio` is on; else 0.
        virtual: processes, signals and disk are: nothing is asked of this machine.
    """

    learners: tuple[str, ...]
    seed: int = 0
    max_steps: int
    step_floor_s: float = 0.0
    first_checkpoint_s: float = 0.0
    guarded: int = 0
    virtual: bool = False


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What is to fail in a run; `name` is the choice of the group `chaos`."""

    name: str
    run: RunShape
    guard: Guard
    faults: tuple[Fault, ...] = ()
    poisson: PoissonPlan | None = None

    @classmethod
    def load(cls, values: Mapping[str, Any], run: RunShape) -> FaultPlan:
        """From the resolved settings `chaos`.

        Raises:
            ValueError: a key or value that is not allowed, a fault that cannot fire in this run, or
                one that this machine cannot carry out.
        """
        name, single = values.get("name"), "kind" in values
        if not isinstance(name, str) or not name:
            raise refuse("chaos.name", name, "a word, which the tape calls the faults by")
        if not single:
            known_keys(values, KEYS, "chaos.")
        guard = Guard(
            check_choice("chaos.not_before", values.get("not_before", NOT_BEFORE[0]), NOT_BEFORE),
            check_number("chaos.min_left_s", values.get("min_left_s", 0.0), 0.0),
        )
        seed = values.get("seed")
        seed = run.seed if seed is None else int(check_number("chaos.seed", seed, 0))
        listed = values.get("faults") or ()
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise refuse("chaos.faults", listed, "a list, as [{kind: kill, target: 1, at_step: 9}]")
        drawn = values.get("poisson")
        if single + bool(listed) + (drawn is not None) > 1 or (listed and name == "none"):
            given = [key for key in ("kind", "faults", "poisson") if values.get(key)]
            raise refuse(f"chaos={name} with", given, "one of them", "Own lists: chaos=plan.")
        if single:
            own = {key: value for key, value in values.items() if key not in KEYS}
            faults = [read_fault(0, own, run.learners, "chaos.")]
        else:
            faults = [
                read_fault(number, entry, run.learners, f"chaos.faults[{number}].")
                for number, entry in enumerate(listed)
            ]
        poisson = None
        if drawn is not None:
            poisson = read_poisson(drawn, run.learners, seed, len(faults))
        plan = cls(name, run, guard, tuple(faults), poisson)
        plan._check_times()
        plan._check_means()
        return plan

    # ------------------------------------------------------------------ what it needs

    @property
    def roles(self) -> Mapping[str, frozenset[str]]:
        """Kinds of fault by the process that they may befall."""
        pairs = [(fault.kind, fault.role) for fault in self.faults]
        for choice in self.poisson.choices if self.poisson else ():
            targets = (choice.target,) if choice.target else self.run.learners
            pairs += [
                (choice.kind, SYNCER if target == SYNCER else f"learner {target}")
                for target in targets
            ]
        roles = {role for _, role in pairs}
        return {role: frozenset(kind for kind, of in pairs if of == role) for role in roles}

    @property
    def kinds(self) -> frozenset[str]:
        """Every kind that may happen."""
        return frozenset().union(*self.roles.values())

    @property
    def kills(self) -> frozenset[str]:
        """Roles that may be killed: "syncer", "learner 0"."""
        deadly = {"kill", "kill_syncer"}
        return frozenset(role for role, kinds in self.roles.items() if kinds & deadly)

    @property
    def needs_proxy(self) -> bool:
        """Whether learners must be reached through the proxy, under network=none too."""
        return any(KINDS[kind].network for kind in self.kinds)

    @property
    def needs_root(self) -> bool:
        """Whether a file system is mounted."""
        return "full_disk" in self.kinds and not self.run.virtual

    @property
    def disk_mib(self) -> int | None:
        """Size of the small disk under the syncer's checkpoints; None: the ordinary one."""
        choices = self.poisson.choices if self.poisson else ()
        sizes = [
            one.options["size_mib"] for one in (*self.faults, *choices) if one.kind == "full_disk"
        ]
        return max(sizes, default=None)

    def at_steps_of(self, learner: str) -> list[Fault]:
        """Faults that wait for a step of this learner, earliest first."""
        found = [fault for fault in self.faults if fault.at_learner == learner]
        return sorted(found, key=lambda fault: fault.at_step or 0)

    # ------------------------------------------------------------------ for the user

    @property
    def window_s(self) -> float | None:
        """How long faults may fire, as far as it is known before steps were measured."""
        run = self.run
        if run.step_floor_s <= 0:
            return None
        first_s = run.first_checkpoint_s if self.guard.not_before == "first_checkpoint" else 0.0
        return run.max_steps * run.step_floor_s - self.guard.min_left_s - first_s

    def describe(self) -> list[str]:
        """What is planned, a line each; a Poisson process as far as it is known by now."""
        lines = [f"chaos {self.name}: {fault.describe()}" for fault in self.faults]
        if self.poisson is None:
            return lines
        since = "the first checkpoint" if self.guard.not_before == NOT_BEFORE[0] else "the start"
        window_s = self.window_s
        if window_s is None:
            mean_s = self.poisson.mean_s
            mean = "measured steps decide" if mean_s is None else f"{mean_s:.1f} s"
            return [*lines, f"chaos {self.name}: Poisson faults from {since} on, mean {mean}"]
        mean_s = self.poisson.scaled(window_s)
        early = takewhile(lambda drawn: drawn[0] < window_s, self.poisson.draw(mean_s))
        drawn = [f"{fault.kind} of {fault.role} at {at_s:.1f} s" for at_s, fault in early]
        what = ", ".join(drawn) or f"none within the {window_s:.0f} s that are left for them"
        return [
            *lines,
            f"chaos {self.name}: Poisson faults, mean {mean_s:.1f} s, seconds from {since} on: "
            f"{what} (a clock that stands still while nobody steps)",
        ]

    # ------------------------------------------------------------------ checks of the whole

    def _check_times(self) -> None:
        run, guard = self.run, self.guard
        for fault in self.faults:
            where = "chaos." if len(self.faults) == 1 else f"chaos.faults[{fault.number}]."
            if fault.at_step is not None and fault.at_step >= run.max_steps:
                raise refuse(f"{where}at_step", fault.at_step, f"below max_steps = {run.max_steps}")
            left_s = (run.max_steps - (fault.at_step or 0)) * run.step_floor_s
            if fault.at_step is not None and run.step_floor_s > 0 and left_s < guard.min_left_s:
                latest = run.max_steps - int(-(-guard.min_left_s // run.step_floor_s))
                raise refuse(
                    f"{where}at_step",
                    fault.at_step,
                    f"at most {latest}, since chaos.min_left_s = {guard.min_left_s:g} s of steps "
                    "must be left when it fires",
                )
        if self.poisson is not None and self.window_s is not None and self.window_s <= 0:
            raise refuse(
                "trainer.max_steps",
                run.max_steps,
                f"more steps of {run.step_floor_s:g} s, so that faults may fire between the first "
                f"checkpoint and the last chaos.min_left_s = {guard.min_left_s:g} s",
            )

    def _check_means(self) -> None:
        """Whether run and machine have what the kinds of fault need."""
        if self.kinds and os.name != "posix" and not self.run.virtual:
            raise refuse("chaos", self.name, "none on this system, which has no POSIX signals")
        if self.needs_root and not _may_mount():
            raise refuse(
                "chaos",
                self.name,
                "on Linux, as root with the right to mount (CAP_SYS_ADMIN)",
                "full_disk fills a real small tmpfs, mounted over the run folder's syncer/.",
            )
        poisons = [one.options["values"] for one in self.faults if one.kind == "poison"]
        if self.poisson is not None:
            poisons += [c.options["values"] for c in self.poisson.choices if c.kind == "poison"]
        learners = len(self.run.learners)
        if "huge" in poisons and min(learners, self.run.guarded) < GUARD_CONTRIBUTIONS:
            raise refuse(
                "chaos values=huge with learners, guarded quorum",
                (learners, self.run.guarded),
                f"at least {GUARD_CONTRIBUTIONS} of both, or huge values would be merged",
                "As chaos=poison_huge learners=4 has it: algorithm.max_norm_ratio=4 "
                "algorithm.quorum=3.",
            )


def _may_mount() -> bool:
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1)
    return False
