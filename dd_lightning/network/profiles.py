"""WAN profiles: named regions, a matrix of links with units in the keys, outage windows.

A profile says what the network is (round trip, Mbit/s, jitter, loss, TCP); `link.py` says what that
does to bytes and `proxy.py` does it to real ones. Nothing here has a clock or a socket.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, Self

TCP_KINDS = ("reno", "cubic", "bbr", "none")
SEGMENT_BYTES = 1448  # payload of one 1500-byte packet of a TCP with timestamps
INITIAL_WINDOW_BYTES = 10 * SEGMENT_BYTES  # RFC 6928
MIB = 2**20


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _number(where: str, value: Any, *, above: float | None = None, least: float = 0.0) -> None:
    """Refuse what is not a finite number above `above`, or else at least `least`."""
    kind_ok = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    allowed = (
        f"a finite number > {above:g}" if above is not None else f"a finite number >= {least:g}"
    )
    in_range = kind_ok and (value > above if above is not None else value >= least)
    _require(in_range, f"{where}={value!r}: it must be {allowed}")


def _known_keys(where: str, mapping: Any, allowed: Iterable[str]) -> None:
    _require(isinstance(mapping, Mapping), f"{where} must be a mapping, not {mapping!r}")
    allowed = list(allowed)
    for key in mapping:
        _require(key in allowed, f"{where}.{key} is unknown; the keys are {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class Link:
    """One path; `up` is from the first region (the learner's) to the second (the syncer's).

    Args:
        rtt_ms: round trip; each direction gets half of it.
        jitter_ms: scale (sigma) of a half-normal extra delay per chunk; a flow's order is kept.
        loss: share of packets lost, 0..1; 1 % is 0.01. What it costs depends on `tcp`.
        tcp: congestion control that is modelled: reno, cubic, bbr, or none (no window, no ramp).
        window_mib: largest TCP window of one connection; one flow gets at most window / rtt.
        slow_start: whether a connection ramps up from ten packets (reno and cubic also after idle).
        scale: the `bandwidth_scale` that rates and window have been multiplied by already.

    Raises:
        ValueError: a value out of its range, by name.
    """

    rtt_ms: float
    up_mbit_s: float
    down_mbit_s: float
    jitter_ms: float = 0.0
    loss: float = 0.0
    tcp: str = "cubic"
    window_mib: float = 24.0  # throughput x RTT of 2106 measured cloud pairs: 24-27 MiB
    slow_start: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rtt_ms", "jitter_ms", "loss"):
            _number(f"link {name}", getattr(self, name))
        for name in ("up_mbit_s", "down_mbit_s", "window_mib", "scale"):
            _number(f"link {name}", getattr(self, name), above=0.0)
        _require(self.loss < 1, f"link loss={self.loss}: a share in 0..1, below 1; 1 % is 0.01")
        _require(
            self.tcp in TCP_KINDS,
            f"link tcp={self.tcp!r} is unknown; choose one of {', '.join(TCP_KINDS)}",
        )
        _require(
            isinstance(self.slow_start, bool),
            f"link slow_start={self.slow_start!r}: it must be true or false",
        )

    def reversed(self) -> Self:
        """The same path seen from its other end: up and down change places."""
        return replace(self, up_mbit_s=self.down_mbit_s, down_mbit_s=self.up_mbit_s)

    def scaled(self, factor: float) -> Self:
        """Rates and window times `factor`; round trip, jitter and packet size stay.

        So a fragment `factor` times the size takes as long as the big one, while a small message
        still costs a round trip and no more.
        """
        return replace(
            self,
            up_mbit_s=self.up_mbit_s * factor,
            down_mbit_s=self.down_mbit_s * factor,
            window_mib=max(self.window_mib * factor, INITIAL_WINDOW_BYTES / MIB),
            scale=self.scale * factor,
        )


SAME_REGION = Link(rtt_ms=0.5, up_mbit_s=10_000.0, down_mbit_s=10_000.0)  # the lan profile
_LINK_KEYS = tuple(f.name for f in fields(Link) if f.name != "scale") + ("mbit_s",)
_OUTAGE_KEYS = ("region", "pair", "start_s", "seconds", "every_s")


@dataclass(frozen=True, slots=True)
class Outage:
    """A window in which a region, or one pair of regions, delivers nothing.

    Args:
        regions: one region (all its paths are hit) or the two ends of one path.
        start_s: seconds since the network's start; the window is [start_s, start_s + seconds).
        every_s: the window comes back with this period; None: once.
    """

    regions: frozenset[str]
    start_s: float
    seconds: float
    every_s: float | None = None

    def __post_init__(self) -> None:
        _require(len(self.regions) in (1, 2), f"an outage names one region or one pair: {self}")
        _number("outage start_s", self.start_s)
        _number("outage seconds", self.seconds, above=0.0)
        if self.every_s is not None:
            # equal would be an outage that never ends, which every wait would run into
            _number("outage every_s (longer than its seconds)", self.every_s, above=self.seconds)

    def hits(self, region: str, other: str) -> bool:
        """Whether the path between the two regions is cut in the windows."""
        return self.regions <= {region, other}

    def first_overlap(self, begin_s: float, end_s: float) -> tuple[float, float] | None:
        """The first window that shares a moment with [begin_s, end_s], or None."""
        start = self.start_s
        if self.every_s is not None and begin_s >= start + self.seconds:
            start += ((begin_s - start - self.seconds) // self.every_s + 1) * self.every_s
        over = begin_s >= start + self.seconds or end_s < start
        return None if over else (start, start + self.seconds)


@dataclass(frozen=True, slots=True)
class WanProfile:
    """A network: who is where and what the paths between the regions are like.

    Args:
        links: by pair of regions; `up` of ("a", "b") is from a to b.
        learner_regions: learner k sits in entry k modulo their number.
        bandwidth_scale: what `link()` multiplies rates and windows by, so that a tiny model
            feels a big one's transfer (README of the experiment: compare rho).
        source: where the figures are from.
        assumed: names of the fields that nobody measured.
    """

    name: str
    regions: tuple[str, ...]
    links: Mapping[tuple[str, str], Link]
    syncer_region: str
    learner_regions: tuple[str, ...]
    bandwidth_scale: float = 1.0
    outages: tuple[Outage, ...] = ()
    source: str = ""
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"network {self.name}"
        _require(bool(self.regions), f"{where}: regions is empty; name at least one")
        _require(len(set(self.regions)) == len(self.regions), f"{where}: a region is named twice")
        _number("network.bandwidth_scale", self.bandwidth_scale, above=0.0)
        mentioned = {self.syncer_region, *self.learner_regions}
        mentioned.update(*self.links, *(outage.regions for outage in self.outages))
        for region in sorted(mentioned, key=str):
            _require(
                region in self.regions,
                f"{where}: region {region!r} is unknown; the regions are {', '.join(self.regions)}",
            )
        _require(bool(self.learner_regions), f"{where}: learner_regions is empty")
        if not self.needs_proxy:
            _require(
                len(self.regions) == 1 and not self.outages,
                f"{where} has no links, so several regions or outages would have no effect; "
                "give it links",
            )
            if self.bandwidth_scale != 1:  # no error: sweeps over networks set it for all of them
                warnings.warn(
                    f"{where} has no links: bandwidth_scale={self.bandwidth_scale:g} has no effect",
                    stacklevel=2,
                )
            return
        for region in self.learner_regions:
            gap_s = self.link(region).rtt_ms / 1e3  # raises where the matrix has a hole
            for outage in self.outages_of(region):
                _require(
                    outage.every_s is None or outage.every_s - outage.seconds > gap_s,
                    f"{where}: {outage} leaves no round trip of {gap_s:g} s between two windows: "
                    "nothing would ever arrive; raise every_s",
                )

    @property
    def needs_proxy(self) -> bool:
        """False where nothing is shaped (network=none): learners then connect straight."""
        return bool(self.links)

    def region_of(self, learner_index: int) -> str:
        """Region of the learner with this index (0 is the first): round robin."""
        return self.learner_regions[learner_index % len(self.learner_regions)]

    def link(self, region: str) -> Link:
        """The scaled path between a learner's region and the syncer's; `up` is to the syncer.

        Raises:
            ValueError: the matrix has no link between the two.
        """
        pair = (region, self.syncer_region)
        if pair in self.links:
            found = self.links[pair]
        elif pair[::-1] in self.links:
            found = self.links[pair[::-1]].reversed()
        elif region == self.syncer_region and self.needs_proxy:
            found = SAME_REGION  # two machines of one region are not one machine
        else:
            raise ValueError(
                f"network {self.name} has no link between {region!r} and the syncer's region "
                f"{self.syncer_region!r}; add network.links.{region}-{self.syncer_region}"
            )
        return found.scaled(self.bandwidth_scale)

    def outages_of(self, region: str) -> tuple[Outage, ...]:
        """The outages that cut a learner of this region off the syncer."""
        return tuple(o for o in self.outages if o.hits(region, self.syncer_region))

    def table(self) -> list[dict[str, str]]:
        """What is applied, one row per learner region, ready to print; assumed figures get `*`."""
        rows = []
        for region in dict.fromkeys(self.learner_regions if self.needs_proxy else ()):
            link = self.link(region)
            row = {"region": region, "syncer_region": self.syncer_region}
            for key in _LINK_KEYS[:-1]:
                value = getattr(link, key)
                text = f"{value:g}" if isinstance(value, float) else str(value)
                row[key] = text + ("*" if key in self.assumed else "")
            row["outages"] = ", ".join(
                f"{o.seconds:g} s at {o.start_s:g} s"
                + ("" if o.every_s is None else f" every {o.every_s:g} s")
                for o in self.outages_of(region)
            )
            rows.append(row)
        return rows

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build from a plain mapping, as the Hydra group `network` resolves to.

        Keys: name, regions, syncer_region, learner_regions (null: the regions in order), links
        (`a-b: {rtt_ms, mbit_s | up_mbit_s + down_mbit_s, ...}`; `default: {...}` fills what a
        pair leaves out), bandwidth_scale, outages, assumed, source.

        Raises:
            ValueError: an unknown key, a value out of its range, a region nobody named.
        """
        _known_keys("network", config, (f.name for f in fields(cls)))
        for key in ("name", "regions", "syncer_region"):
            _require(bool(config.get(key)), f"network.{key} is missing")
        regions = tuple(config["regions"])
        for region in regions:
            _require(
                isinstance(region, str) and bool(region) and "-" not in region,
                f"network.regions: {region!r} must be a name without '-', which joins a pair",
            )
        return cls(
            name=config["name"],
            regions=regions,
            links=_links(config.get("links") or {}),
            syncer_region=config["syncer_region"],
            learner_regions=tuple(config.get("learner_regions") or regions),
            bandwidth_scale=config.get("bandwidth_scale", 1.0),
            outages=tuple(_outage(entry) for entry in config.get("outages") or ()),
            source=config.get("source") or "",
            assumed=tuple(config.get("assumed") or ()),
        )


def _pair(where: str, text: Any) -> tuple[str, str]:
    parts = text.split("-") if isinstance(text, str) else []
    _require(len(parts) == 2, f"{where}: {text!r} must be two regions joined by '-', as a-b")
    return parts[0], parts[1]


def _links(config: Mapping[str, Any]) -> dict[tuple[str, str], Link]:
    default = config.get("default") or {}
    links: dict[tuple[str, str], Link] = {}
    for key, own in config.items():
        where = f"network.links.{key}"
        own = own or {}
        _known_keys(where, own, _LINK_KEYS)
        if key == "default":
            continue
        pair = _pair("network.links", key)
        _require(
            pair not in links and pair[::-1] not in links,
            f"{where}: this pair is given twice; one entry holds both directions",
        )
        values = {**default, **own}
        if "mbit_s" in values:
            _require(
                "up_mbit_s" not in values and "down_mbit_s" not in values,
                f"{where}: give mbit_s, or up_mbit_s and down_mbit_s, not both",
            )
            values["up_mbit_s"] = values["down_mbit_s"] = values.pop("mbit_s")
        for name in ("rtt_ms", "up_mbit_s", "down_mbit_s"):
            _require(name in values, f"{where}: {name} is missing (mbit_s sets both directions)")
        try:
            links[pair] = Link(**values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return links


def _outage(entry: Any) -> Outage:
    _known_keys("network.outages", entry, _OUTAGE_KEYS)
    _require(
        ("region" in entry) != ("pair" in entry),
        f"network.outages: {dict(entry)} must name either a region or a pair (a-b)",
    )
    for key in ("start_s", "seconds"):
        _require(key in entry, f"network.outages: {dict(entry)} has no {key}")
    if "pair" in entry:
        ends = frozenset(_pair("network.outages.pair", entry["pair"]))
    else:
        ends = frozenset((entry["region"],))
    return Outage(ends, entry["start_s"], entry["seconds"], entry.get("every_s"))
