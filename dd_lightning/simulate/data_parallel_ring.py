"""The ring all-reduce of data-parallel training over a profile's links: how long, how many bytes.

2(M - 1) phases; in each, every member sends one chunk of a 1/M-th to its right neighbour, and goes
on once the chunk of its left neighbour is there. The ring goes region by region, so that the
fewest possible edges cross a sea. Each edge is a flow of `network.link`'s model: slow start,
windows, loss, jitter and outages count as they do for a contribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

from dd_lightning.network.control import PathFaults
from dd_lightning.network.link import LinkModel, Path
from dd_lightning.network.profiles import WanProfile


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One all-reduce: when the last member has all of the sum, and what was sent when.

    `sends`: (seconds when it was handed over, sender, receiver, bytes), in the order of phases.
    """

    ended_s: float
    sends: tuple[tuple[float, int, int, int], ...] = ()

    def wire(self, before_s: float = float("inf")) -> dict[int, tuple[int, int]]:
        """Bytes (sent, received) by member, of what was handed over before that time."""
        found: dict[int, tuple[int, int]] = {}
        for at_s, sender, receiver, num_bytes in self.sends:
            if at_s < before_s:
                up, down = found.get(sender, (0, 0))
                found[sender] = (up + num_bytes, down)
                up, down = found.get(receiver, (0, 0))
                found[receiver] = (up, down + num_bytes)
        return found


@dataclass(slots=True)
class _Edge:
    """From one member to its right neighbour: one flow, or two by way of the syncer's region."""

    legs: list[Path] = field(default_factory=list)
    faults: list[PathFaults] = field(default_factory=list)

    def send(self, now: float, num_bytes: int) -> float:
        for leg in self.legs:
            now = leg.send(now, num_bytes)
        return now


class Ring:
    """All-reduces of the run's members.

    Args:
        profile: without links (`network=none`) an all-reduce takes no time.
    """

    def __init__(self, profile: WanProfile, seed: int) -> None:
        self._profile, self._seed = profile, seed
        self._edges: dict[tuple[int, int], _Edge] = {}
        self._commands: list[tuple[float, int, Mapping[str, Any]]] = []
        self._groups = 0

    def order(self, members: Sequence[int]) -> list[int]:
        """Members as they sit in the ring: by region, within it by number."""
        regions = self._profile.regions
        return sorted(
            members, key=lambda member: (regions.index(self._profile.region_of(member)), member)
        )

    def all_reduce(self, now: float, members: Sequence[int], sizes: Sequence[int]) -> AllReduce:
        """Sum and hand out what all `members` have ready at `now`.

        Args:
            sizes: bytes of the chunks, one a member; see `chunks`.
        """
        ring = self.order(members)
        count = len(ring)
        if count < 2:
            return AllReduce(now)
        have = [now] * count  # when the member may send the chunk of this phase
        sends = []
        for phase in range(2 * (count - 1)):
            arrived = list(have)
            # in the order of time, as `Path.send` asks for
            for seat in sorted(range(count), key=have.__getitem__):
                right, size = (seat + 1) % count, sizes[(seat - phase) % count]
                sends.append((have[seat], ring[seat], ring[right], size))
                arrives = self._edge(ring[seat], ring[right]).send(have[seat], size)
                arrived[right] = max(have[right], arrives)
            have = arrived
        return AllReduce(max(have), tuple(sends))

    def connect_anew(self) -> None:
        """A new group of members has new connections, which ramp up again."""
        self._edges.clear()
        self._groups += 1

    def disturb(self, now: float, member: int, command: Mapping[str, Any]) -> None:
        """A fault of the network at one member, as `PathFaults.apply` takes it."""
        self._commands.append((now, member, command))
        for pair, edge in self._edges.items():
            if member in pair:
                for faults in edge.faults:
                    faults.apply(command, now)

    def _edge(self, sender: int, receiver: int) -> _Edge:
        pair = (sender, receiver)
        if pair not in self._edges:
            self._edges[pair] = self._build(*pair)
            for at_s, member, command in self._commands:  # an edge may come with a smaller ring
                if member in pair:
                    for faults in self._edges[pair].faults:
                        faults.apply(command, at_s)
        return self._edges[pair]

    def _build(self, sender: int, receiver: int) -> _Edge:
        edge, profile = _Edge(), self._profile
        if not profile.needs_proxy:
            return edge
        source, target = profile.region_of(sender), profile.region_of(receiver)
        if source == target or {(source, target), (target, source)} & profile.links.keys():
            self._add(edge, source, target, "up", pair=(sender, receiver))
        else:  # as the homes of `home`, which reach each other through the cloud only
            self._add(edge, source, profile.syncer_region, "up", pair=(sender, receiver))
            self._add(edge, target, profile.syncer_region, "down", pair=(sender, receiver))
        return edge

    def _add(
        self, edge: _Edge, region: str, other: str, way: Any, *, pair: tuple[int, int]
    ) -> None:
        """A flow between two regions, seen from `region`; each edge has machines of its own."""
        between = replace(self._profile, syncer_region=other, learner_regions=(region,))
        seed = ((self._seed * 1_000_003 + self._groups) * 1_009 + pair[0]) * 1_009 + pair[1]
        faults = PathFaults(between.link(region), region, 0.0, Random(f"{seed}:faults"))
        edge.legs.append(LinkModel(between, seed).path(region, way, faults))
        edge.faults.append(faults)


def chunks(num_elements: int, members: int, bytes_per_element: int = 4) -> list[int]:
    """Bytes of the chunks into which the members' ring cuts a gradient; they differ by one
    element at most."""
    edges = [index * num_elements // members for index in range(members + 1)]
    return [(end - begin) * bytes_per_element for begin, end in pairwise(edges)]
