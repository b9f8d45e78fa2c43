"""What a run will need before it is started: bytes, times, memory, and what binds.

Formulas on the run's own rules (`protocol/estimates.py`, `openings.py`) and the network's link
model; nothing is started. All times in seconds, sizes in bytes, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dd_lightning.network.profiles import WanProfile
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.simulate.estimate_links import (
    HEADER_BYTES_DOWN,
    HEADER_BYTES_UP,
    REPORT_BYTES,
    Path,
    interval,
    paths,
    start_s,
)

THETA_BYTES = 4  # an element of Θ on its way to the learners
CODEC_BYTES = {"none": 4, "bf16": 2}  # an element of a contribution of a float32 learner
MERGE_BYTES_S = 1.0e9  # contributions through checks, merge and outer step, one thread
COPY_BYTES_S = 2.0e9  # snapshot or apply at a boundary, device to host memory
SYNCER_BASE_BYTES = 760e6  # a syncer's process without a model: torch and Lightning, measured
SYNCER_FIRST_BYTES = 92e6  # what the first merges and checkpoints load, whatever the model
# Θ, momentum, published bytes, copies of Θ and momentum for the checkpoint, received values
SYNCER_COPIES = 6
KEPT_COPIES = 3  # further published versions, where a codec sends deltas
DEFAULT_MEMORY_BYTES = 64e9
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
    staleness: int  # merges of a fragment that its contributions do not know of
    overwrite_cost: float  # share of the work that overwrite loses: latency / H
    bytes_up_per_step: float
    bytes_down_per_step: float
    link_share: float  # of the time in which its busier direction is in use


@dataclass(frozen=True, slots=True)
class Estimate:
    """A run; `binding` names the resource that is used most, `advice` what would help."""

    learners: tuple[LearnerEstimate, ...]
    effective_h: float  # as the summary has it: with the last rounds of a run of `steps`
    steady_h: float  # without them
    in_flight: int
    bytes_per_step: float  # all learners, both directions
    bytes_per_hour: float
    egress_per_day: float  # of the syncer's side, to the learners
    syncer_memory: float
    syncer_memory_empty: float  # of it, without a model
    syncer_memory_share: float  # of the memory of its machine
    syncer_cpu_share: float  # of one core
    boundary_share: float  # of a step, for copies
    binding: str
    advice: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def estimate(
    parameters: int,
    config: SyncerConfig,
    network: WanProfile,
    step_s: float,
    steps: int | None = None,
    memory: float = DEFAULT_MEMORY_BYTES,
) -> Estimate:
    """Estimate a run of `config.learners` learners.

    Args:
        parameters: trainable elements.
        step_s: seconds of one inner step.
        steps: of each learner: the run's first download and last rounds are counted in. None: a
            run without end.
        memory: of the syncer's machine, bytes.

    Raises:
        ValueError: no parameter, step or learner, or a codec without a known size.
    """
    _check(parameters, config, step_s, steps, memory)
    algorithm = config.algorithm
    size = parameters / algorithm.fragments
    up = size * CODEC_BYTES[str(algorithm.codec)]
    ways = paths(config.learners or 1, network, up, size * THETA_BYTES, step_s)
    every_s, in_flight = interval(ways, config, step_s)
    steady_h = every_s * algorithm.fragments / step_s
    plan = _Plan(
        parameters, algorithm.fragments, up, step_s, steps, every_s, steady_h,
        _with_ends(steady_h, steps, ways, algorithm.fragments, step_s), in_flight,
    )  # fmt: skip
    rows = tuple(plan.learner(index, way) for index, way in enumerate(ways))
    return _whole(rows, plan, config, memory)


def _with_ends(
    steady_h: float, steps: int | None, ways: Sequence[Path], fragments: int, step_s: float
) -> float:
    """Effective H of a run of `steps`: rounds go on while a learner that joined later trains, and
    one last round of each fragment merges what is handed in at the end."""
    if steps is None:
        return steady_h
    starts = [start_s(way, fragments) for way in ways]
    later = (max(starts) - min(starts)) / step_s
    return steps / ((steps + later) / steady_h + 1)


def _check(
    parameters: int, config: SyncerConfig, step_s: float, steps: int | None, memory: float
) -> None:
    given = {"parameters": parameters, "step-s": step_s, "steps": 1 if steps is None else steps}
    given["memory-gb"] = memory / 1e9
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"--{name} is {value!r}; allowed: a number above 0.")
    if str(config.algorithm.codec) not in CODEC_BYTES:
        raise ValueError(
            f"algorithm.codec is {config.algorithm.codec!r}; estimate knows the sizes of "
            f"{' | '.join(CODEC_BYTES)}."
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    parameters: int
    fragments: int
    up: float  # bytes of one fragment's contribution
    step_s: float
    steps: int | None
    interval_s: float  # between two rounds
    steady_h: float
    effective_h: float
    in_flight: int

    @property
    def down(self) -> float:
        """Bytes of one fragment of Θ."""
        return THETA_BYTES * self.parameters / self.fragments

    def learner(self, index: int, way: Path) -> LearnerEstimate:
        """One learner's row."""
        latency = LATENCY_STEPS_OVERWRITE + (way.rtt_s + way.up_s + way.down_s) / self.step_s
        # a link that is too slow carries what it can: older fragments give way to newer ones
        answered = min(1.0, self.interval_s / max(way.up_s, 1e-9))
        received = min(1.0, self.interval_s / max(way.down_s, 1e-9))
        rounds = self.fragments / self.steady_h  # a step
        # once a run: Θ to everyone at the start, which the first learner hands in; the last
        # contributions and merges
        ends = self.fragments / self.steps if self.steps else 0.0
        first = ends * self.down if index == 0 else 0.0
        return LearnerEstimate(
            learner=str(index),
            region=way.region,
            rtt_ms=1e3 * way.rtt_s,
            transfer_up_s=way.up_s,
            transfer_down_s=way.down_s,
            rho_s=way.rho_s,
            latency_steps=latency,
            staleness=int(latency / self.steady_h),
            overwrite_cost=min(1.0, latency / self.steady_h),
            bytes_up_per_step=(rounds * answered + ends) * (self.up + HEADER_BYTES_UP)
            + first
            + REPORT_BYTES,
            bytes_down_per_step=(rounds * received + 2 * ends) * (self.down + HEADER_BYTES_DOWN),
            link_share=max(way.up_s, way.down_s) / self.interval_s,
        )


def _whole(
    rows: tuple[LearnerEstimate, ...], plan: _Plan, config: SyncerConfig, memory_there: float
) -> Estimate:
    step_s = plan.step_s
    sent_down = sum(row.bytes_down_per_step for row in rows)
    per_step = sent_down + sum(row.bytes_up_per_step for row in rows)
    held = len(rows) * plan.in_flight * (plan.up + plan.down)
    cpu = len(rows) * plan.up / MERGE_BYTES_S / plan.interval_s
    boundary = 2 * THETA_BYTES * plan.parameters / plan.steady_h / COPY_BYTES_S / step_s
    copies = SYNCER_COPIES + (KEPT_COPIES if str(config.algorithm.codec) != "none" else 0)
    grown = SYNCER_FIRST_BYTES + copies * THETA_BYTES * plan.parameters + held
    memory = SYNCER_BASE_BYTES + grown
    shares = {
        "link": max(row.link_share for row in rows),
        "syncer CPU": cpu,
        "boundary": boundary,
        "syncer memory": memory / memory_there,
    }
    return Estimate(
        learners=rows,
        effective_h=plan.effective_h,
        steady_h=plan.steady_h,
        in_flight=plan.in_flight,
        bytes_per_step=per_step,
        bytes_per_hour=per_step / step_s * 3600,
        egress_per_day=sent_down / step_s * 86400,
        syncer_memory=memory,
        syncer_memory_empty=SYNCER_BASE_BYTES,
        syncer_memory_share=memory / memory_there,
        syncer_cpu_share=cpu,
        boundary_share=boundary,
        binding=max(shares, key=lambda name: shares[name]),
        advice=tuple(_advice(rows, plan.steady_h, config) + _needs(memory, memory_there)),
    )


def _needs(memory: float, memory_there: float) -> list[str]:
    if memory <= memory_there:
        return []
    return [
        f"the syncer needs {memory / 1e9:.0f} GB, its machine has {memory_there / 1e9:.0f} "
        "(--memory-gb): take a larger one"
    ]


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
