"""Every container of the round machine, of links and of ledgers, by its path, and its bound.

`learners` counts ids, `fragments` is P. No bound knows how many joins, rounds or refusals there
have been. What is not listed may hold a few entries for each fragment of each learner.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from msgspec import Struct
from torch import Tensor

from dd_lightning.protocol import progress
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.layout import Layout
from dd_lightning.protocol.refusals import MOST_IDS

LEAVES = (str, bytes, int, float, bool, type(None), Tensor, SyncerConfig, Layout, Struct, Enum)
PARTS = ("dd_lightning.protocol",)

Bound = Callable[[int, int], int]  # of (learners, fragments)

BOUNDS: dict[str, Bound] = {
    # the run
    "core.run.members": lambda m, p: m,
    "core.run.generations": lambda m, p: m,
    "core.run.slots": lambda m, p: m,
    "core.run.past": lambda m, p: m,
    "core.run.lost_at": lambda m, p: m,
    "core.run.finished_learners": lambda m, p: m,
    "core.run.sessions": lambda m, p: 2 * m,
    "core.run.accounts": lambda m, p: m + 3 * m * p,  # the last life's, and what rounds still hold
    "core.run.warned": lambda m, p: 2 * m + 8,
    "core.run.versions": lambda m, p: p,
    "core.run.early": lambda m, p: 4 * p,
    "core.run.early[]": lambda m, p: m,
    "core.run.final_inbox[]": lambda m, p: m,
    "core.run.actions": lambda m, p: 0,  # carried out
    "core.run.book.open": lambda m, p: p,
    "core.run.book.merging": lambda m, p: p,
    "core.run.members[].rho": lambda m, p: 4 * p,
    "core.run.members[].took_part": lambda m, p: 4 * p,
    "core.run.members[].outbox.waiting": lambda m, p: p,
    "core.run.members[].outbox.under_way": lambda m, p: p,
    "core.run.members[].losses": lambda m, p: progress.LOSSES,
    # those who decide
    "core.conductor.closing.quorum_times": lambda m, p: 4 * p,
    "core.conductor.closing.held_merges": lambda m, p: p,
    "core.conductor.bookings.deliveries": lambda m, p: p,
    "core.conductor.bookings.waiting_applies": lambda m, p: 4 * m * p,
    "core.admission.refused._unsaid": lambda m, p: MOST_IDS + 1,
    "core._handlers": lambda m, p: 64,
    # a learner
    "link._uploads": lambda m, p: 2 * p,
    "link._actions": lambda m, p: 0,
    "link.progress._under_way": lambda m, p: progress.ROUND_TRIPS,
    "ledger._fragments": lambda m, p: p,
}


def unlisted(learners: int, fragments: int) -> int:
    """Bound of a container that `BOUNDS` does not name."""
    return 4 * learners * fragments + 8


def containers(thing: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """(path, size) of every container reachable from `thing`; elements of one share a path."""
    if isinstance(thing, LEAVES) or callable(thing) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        yield path, len(thing)
        for value in thing.values():
            yield from containers(value, f"{path}[]", seen)
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        if not (isinstance(thing, deque) and thing.maxlen):  # else it carries its bound
            yield path, len(thing)
        for value in thing:
            yield from containers(value, f"{path}[]", seen)
    elif type(thing).__module__.startswith(PARTS):
        for name in _names(thing):
            yield from containers(getattr(thing, name), f"{path}.{name}", seen)


def _names(thing: Any) -> list[str]:
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing)]
    return list(vars(thing))


def check_bounds(fleet: Any) -> None:
    """Between events, of the syncer that is up and of every living learner."""
    learners = len(fleet.specs)
    fragments = fleet.config.algorithm.fragments
    found = list(containers(fleet.core, "core", set())) if fleet.syncer_up else []
    for life in fleet.lives:
        if life.alive and not life.ended:
            found += containers(life.link, "link", set())
            if life.ledger is not None:
                found += containers(life.ledger, "ledger", set())
    for path, size in found:
        most = BOUNDS.get(path, unlisted)(learners, fragments)
        assert size <= most, f"{path} holds {size}, bound {most} ({learners=}, {fragments=})"
