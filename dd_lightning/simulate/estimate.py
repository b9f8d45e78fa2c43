"""What a run will need before it is started: bytes, times, memory, and what binds.

Formulas on the run's own rules (`protocol/estimates.py`, `openings.py`) and the network's link
model; nothing is started. All times in seconds, sizes in bytes, unless a name says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dd_lightning.network.link import BITS_PER_BYTE, Direction, rate_bit_s, transfer_s
from dd_lightning.network.profiles import Link, WanProfile
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.estimates import in_flight_bound

THETA_BYTES = 4  # an element of Θ on its way to the learners
CODEC_BYTES = {"none": 4, "bf16": 2}  # an element of a contribution of a float32 learner
MERGE_BYTES_S = 1.0e9  # contributions through checks, merge and outer step, one thread
COPY_BYTES_S = 2.0e9  # snapshot or apply at a boundary, device to host memory
SYNCER_BASE_BYTES = 340 << 20  # a syncer's process without a model
SYNCER_COPIES = 5  # Θ, momentum, outer gradient, published bytes, copy for the checkpoint
HALF_STEP = 0.5  # what a message waits for the next boundary, on average
LATENCY_STEPS_OVERWRITE = 0.9  # of overwrite, beside RTT and two transfers (protocol.md)


@dataclass(frozen=True, slots=True)
class LearnerEstimate:
    """One learner: per step of its own, and how far behind Θ it works."""

    learner: str
    region: str
    rtt_ms: float
    transfer_up_s: float  # one fragment
    transfer_down_s: float
    rho_s: float  # pull sent to contribution arrived, without the wait for the boundary
    latency_steps: float  # snapshot to apply
    overwrite_cost: float  # share of the work that overwrite loses: latency / H
    bytes_up_per_step: float
    bytes_down_per_step: float
    link_share: float  # of the time in which its busier direction is in use


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run; `binding` names the resource that is used most, `advice` what would help."""

    learners: tuple[LearnerEstimate, ...]
    effective_h: float
    in_flight: int
    bytes_per_step: float  # all learners, both directions
    bytes_per_hour: float
    egress_per_day: float  # of the syncer's side, to the learners
    syncer_memory: float
    syncer_cpu_share: float  # of one core
    boundary_share: float  # of a step, for copies
    binding: str
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def estimate(parameters: int, config: SyncerConfig, network: WanProfile, step_s: float) -> Estimate:
    """Estimate a run of `config.learners` learners.

    Args:
        parameters: trainable elements.
        step_s: seconds of one inner step.

    Raises:
        ValueError: no parameter, step or learner, or a codec without a known size.
    """
    _check(parameters, config, step_s)
    algorithm = config.algorithm
    size = parameters / algorithm.fragments
    up = size * CODEC_BYTES[str(algorithm.codec)]
    down = size * THETA_BYTES
    paths = _paths(config.learners or 1, network, up, down)
    interval, in_flight = _interval(paths, config, step_s)
    effective_h = interval * algorithm.fragments / step_s
    rows = tuple(
        _learner(index, path, up, down, effective_h, interval, algorithm.fragments, step_s)
        for index, path in enumerate(paths)
    )
    return _whole(rows, parameters, up, effective_h, in_flight, interval, config, step_s)


def _check(parameters: int, config: SyncerConfig, step_s: float) -> None:
    for name, value in (("parameters", parameters), ("step-s", step_s)):
        if not 0 < value < float("inf"):
            raise ValueError(f"--{name} is {value!r}; allowed: a number above 0.")
    if str(config.algorithm.codec) not in CODEC_BYTES:
        raise ValueError(
            f"algorithm.codec is {config.algorithm.codec!r}; estimate knows the sizes of "
            f"{' | '.join(CODEC_BYTES)}."
        )


@dataclass(frozen=True, slots=True)
class _Path:
    region: str
    rtt_s: float
    up_s: float
    down_s: float

    @property
    def rho_s(self) -> float:
        return self.rtt_s + self.up_s


def _paths(learners: int, network: WanProfile, up: float, down: float) -> list[_Path]:
    """Learners of one region share its pipe."""
    if not network.needs_proxy:
        return [_Path("local", 0.0, 0.0, 0.0)] * learners
    regions = [network.region_of(index) for index in range(learners)]
    sharing = Counter(regions)
    paths = []
    for region in regions:
        link: Link = network.link(region)
        up_s = max(transfer_s(link, int(up), "up"), sharing[region] * _line_s(link, up, "up"))
        down_s = max(
            transfer_s(link, int(down), "down"), sharing[region] * _line_s(link, down, "down")
        )
        paths.append(_Path(region, link.rtt_ms / 1e3, up_s, down_s))
    return paths


def _line_s(link: Link, size: float, way: Direction) -> float:
    return BITS_PER_BYTE * size / rate_bit_s(link, way)


def _interval(paths: Sequence[_Path], config: SyncerConfig, step_s: float) -> tuple[float, int]:
    """(seconds between two rounds, rounds in flight): the schedule, the links, or the latency."""
    algorithm = config.algorithm
    planned = step_s * algorithm.sync_every / algorithm.fragments
    transfer = median(max(path.up_s, path.down_s) for path in paths)
    rho = median(path.rho_s for path in paths)
    grace = _grace_s(paths, config, step_s)
    configured = algorithm.max_in_flight
    bound = (
        min(configured, algorithm.fragments)
        if isinstance(configured, int)
        else in_flight_bound(
            rho, step_s, grace, transfer, algorithm.sync_every, algorithm.fragments
        )
    )
    open_s = sorted(path.rho_s for path in paths)[config.quorum - 1] + HALF_STEP * step_s + grace
    return max(planned, transfer, open_s / bound), bound


def _grace_s(paths: Sequence[_Path], config: SyncerConfig, step_s: float) -> float:
    """What a round waits for those whose lateness is within the cap."""
    algorithm = config.algorithm
    if algorithm.grace_rule == "none":
        return 0.0
    cap = algorithm.grace_cap
    cap_s = step_s * (max(2.0, algorithm.sync_every / 6) if cap is None else cap)
    arrivals = sorted(path.rho_s for path in paths)
    late = [arrival - arrivals[config.quorum - 1] for arrival in arrivals]
    return max([0.0, *(value for value in late if value <= cap_s)])


def _learner(
    index: int,
    path: _Path,
    up: float,
    down: float,
    effective_h: float,
    interval: float,
    fragments: int,
    step_s: float,
) -> LearnerEstimate:
    latency = LATENCY_STEPS_OVERWRITE + (path.rtt_s + path.up_s + path.down_s) / step_s
    return LearnerEstimate(
        learner=str(index),
        region=path.region,
        rtt_ms=1e3 * path.rtt_s,
        transfer_up_s=path.up_s,
        transfer_down_s=path.down_s,
        rho_s=path.rho_s,
        latency_steps=latency,
        overwrite_cost=min(1.0, latency / effective_h),
        # a link that is too slow carries what it can: older fragments give way to newer ones
        bytes_up_per_step=up * fragments / effective_h * min(1.0, interval / (path.up_s or 1e-9)),
        bytes_down_per_step=down
        * fragments
        / effective_h
        * min(1.0, interval / (path.down_s or 1e-9)),
        link_share=max(path.up_s, path.down_s) / interval,
    )


def _whole(
    rows: tuple[LearnerEstimate, ...],
    parameters: int,
    up: float,
    effective_h: float,
    in_flight: int,
    interval: float,
    config: SyncerConfig,
    step_s: float,
) -> Estimate:
    sent_down = sum(row.bytes_down_per_step for row in rows)
    per_step = sent_down + sum(row.bytes_up_per_step for row in rows)
    held = len(rows) * in_flight * (up + THETA_BYTES * parameters / config.algorithm.fragments)
    cpu = len(rows) * up / MERGE_BYTES_S / interval
    boundary = 2 * THETA_BYTES * parameters / effective_h / COPY_BYTES_S / step_s
    shares = {
        "link": max(row.link_share for row in rows),
        "syncer CPU": cpu,
        "boundary": boundary,
        "latency": max(row.latency_steps for row in rows) / effective_h,
    }
    return Estimate(
        learners=rows,
        effective_h=effective_h,
        in_flight=in_flight,
        bytes_per_step=per_step,
        bytes_per_hour=per_step / step_s * 3600,
        egress_per_day=sent_down / step_s * 86400,
        syncer_memory=SYNCER_BASE_BYTES + SYNCER_COPIES * THETA_BYTES * parameters + held,
        syncer_cpu_share=cpu,
        boundary_share=boundary,
        binding=max(shares, key=lambda name: shares[name]),
        advice=tuple(_advice(rows, effective_h, config)),
    )


def _advice(rows: Sequence[LearnerEstimate], effective_h: float, config: SyncerConfig) -> list[str]:
    algorithm, said = config.algorithm, []
    if effective_h > 1.25 * algorithm.sync_every:
        said.append(
            f"rounds come every {effective_h:.0f} steps instead of algorithm.sync_every="
            f"{algorithm.sync_every}: the links or the round trips do not allow more; raise it to "
            f"{effective_h:.0f}, or take algorithm.codec=bf16"
        )
    for row in rows:
        if row.link_share > 1:
            said.append(
                f"learner {row.learner} ({row.region}) cannot take part in every round: its link "
                f"would be in use {row.link_share:.0%} of the time; raise algorithm.sync_every "
                f"{row.link_share:.1f} times"
            )
    worst = max(rows, key=lambda row: row.latency_steps)
    if algorithm.apply == "overwrite" and worst.latency_steps > effective_h / 5:
        said.append(
            f"learner {worst.learner} loses {100 * worst.overwrite_cost:.0f}% of its work between "
            f"snapshot and apply: algorithm.sync_every={5 * worst.latency_steps:.0f} or more, or "
            "algorithm.apply=rebase"
        )
    return said
