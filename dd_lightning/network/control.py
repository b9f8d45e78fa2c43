"""Faults of single paths, beyond what the profile says: cut, throttled, corrupted. No clock here.

Commands are plain mappings, each with a duration, so that a path heals by itself whatever becomes
of who gave the command. Bytes in a cut are held, as in an outage of the profile; nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from dd_lightning.network.link import Direction, Serializer, rate_bit_s
from dd_lightning.network.profiles import Link, Outage, WanProfile

UNSHAPED = Link(rtt_ms=0.0, up_mbit_s=1000.0, down_mbit_s=1000.0, tcp="none", slow_start=False)
KEYS: Mapping[str, tuple[str, ...]] = {
    "cut": ("seconds", "times", "every_s"),
    "throttle": ("seconds", "share"),
    "corrupt": ("seconds", "flips"),
}


class PathFaults:
    """What befalls all connections of one learner.

    Args:
        link: of the learner, for the rates that are throttled.
        start: time at which the outages' clocks begin, on the clock of every `now` below.
    """

    def __init__(self, link: Link, region: str, start: float, rng: Random) -> None:
        self.cuts: list[Outage] = []
        self._link, self._region, self._start, self._rng = link, region, start, rng
        self._throttles: dict[Direction, Serializer] = {}
        self._throttled_until = float("-inf")
        self._corrupt_until = float("-inf")
        self._flips_left: int | None = None

    def apply(self, command: Mapping[str, Any], now: float) -> None:
        """Begin a fault.

        Raises:
            ValueError: the command is none, or a value is out of its range.
        """
        do = command.get("do")
        unknown = set(command) - {"do", "learner", *KEYS.get(str(do), ())}
        if do not in KEYS or unknown or not command.get("seconds", 0) > 0:
            raise ValueError(f"{dict(command)} is no command; they are {dict(KEYS)}")
        seconds = float(command["seconds"])
        if do == "cut":
            self._cut(now, seconds, command.get("times", 1), command.get("every_s") or seconds)
        elif do == "throttle":
            self._throttle(now, seconds, command["share"])
        else:
            self._corrupt_until = now + seconds
            self._flips_left = command.get("flips")

    def _cut(self, now: float, seconds: float, times: int, every_s: float) -> None:
        begin = now - self._start
        self.cuts = [cut for cut in self.cuts if cut.start_s + cut.seconds > begin]
        region = frozenset((self._region,))
        self.cuts += [Outage(region, begin + n * every_s, seconds) for n in range(times)]

    def _throttle(self, now: float, seconds: float, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"share is {share!r}; allowed: above 0 and below 1")
        self._throttled_until = now + seconds
        for direction in ("up", "down"):
            self._throttles[direction] = Serializer(share * rate_bit_s(self._link, direction))

    # ------------------------------------------------------------------ asked by paths and sides

    def free_at(self, direction: Direction) -> float:
        """When a throttled path takes more; it may be past."""
        throttle = self._throttles.get(direction)
        return min(throttle.free_at, self._throttled_until) if throttle else float("-inf")

    def reserve(self, direction: Direction, since: float, num_bytes: int) -> float:
        """When the last of `num_bytes`, there since `since`, has left; past: not throttled.

        What is still queued when the collapse is over leaves at once.
        """
        if since >= self._throttled_until:
            return float("-inf")
        return min(self._throttles[direction].reserve(since, num_bytes), self._throttled_until)

    def is_corrupt(self, now: float) -> bool:
        """Whether `alter` changes what comes now."""
        return now < self._corrupt_until and self._flips_left != 0

    def alter(self, data: bytes, now: float) -> bytes:
        """The bytes as they come through: one of them wrong while the path is corrupt."""
        if not data or not self.is_corrupt(now):
            return data
        if self._flips_left is not None:
            self._flips_left -= 1
        changed = bytearray(data)
        changed[self._rng.randrange(len(changed))] ^= self._rng.randrange(1, 256)
        return bytes(changed)


def unshaped(profile: WanProfile) -> WanProfile:
    """A profile that shapes nothing as one that can be controlled: a link as fast as loopback is.

    Raises:
        ValueError: it has several regions (its own check refuses that too).
    """
    (region,) = profile.regions
    return replace(profile, links={(region, region): UNSHAPED}, bandwidth_scale=1.0)
