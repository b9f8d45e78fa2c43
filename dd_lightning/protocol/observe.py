"""What is told about a run while it runs: status, per-learner figures, what each learner holds."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from dd_lightning.protocol.accounts import element_weighted
from dd_lightning.protocol.advice import Advice
from dd_lightning.protocol.conductor import Conductor
from dd_lightning.protocol.estimates import quantile
from dd_lightning.protocol.members import LOST, Member
from dd_lightning.protocol.rounds import Round
from dd_lightning.protocol.run_state import RunState


def learner_stats(member: Member, conductor: Conductor) -> dict[str, Any]:
    """Fields of the tape's `learner_stats`; the server adds the bytes of the connection."""
    return {
        "learner": member.learner,
        "generation": member.generation,
        "incarnation": member.join.incarnation,
        "step": member.step,
        "odometer": member.account.odometer,
        "state": member.state,
        "seconds_stepping": member.seconds_stepping,
        "first_step_started_s": member.first_step_s,
        "last_report_s": member.reported_s,
        "step_seconds_p50": member.steps.quantile(0.5),
        "step_seconds_p99": member.steps.quantile(0.99),
        "boundary_ms_p50": _milliseconds(quantile(member.boundaries, 0.5)),
        "boundary_ms_p99": _milliseconds(quantile(member.boundaries, 0.99)),
        "rtt_ms_p50": member.rtt_ms,
        "rho": member.rho_s,
        "loss": _mean_loss(member),
        "steps_unreported_max": member.coalesced_most + 1 if member.state == LOST else 0,
        "version_gap": version_gap(member, conductor.run),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds


def version_gap(member: Member, run: RunState) -> int:
    """Merges, over all fragments, that the learner has not applied."""
    return sum(
        max(0, current[1] - max(0, held[1]))
        for current, held in zip(run.versions, member.versions, strict=False)
    )


def status(
    run: RunState, conductor: Conductor, advice: Advice, endgame: Any, now: float
) -> dict[str, Any]:
    """A snapshot for the live table, `status.json` and operators; plain JSON values. The server
    adds what it alone knows, such as bytes and its checkpoint (`syncer/board.py`)."""
    state = "ending" if endgame.ending else "running" if run.started else "waiting"
    return {
        "t_s": now,
        "run_id": run.run_id,
        "epoch": run.epoch,
        "run_clock": run.clock.value,
        "state": state,
        "next_round": run.book.next_round,
        "open_rounds": len(run.book.open),
        "rounds": [_round(round_, now) for round_ in run.book.all()],
        "max_in_flight": conductor.openings.limit if run.versions else 1,
        "quorum": run.config.quorum,
        "grace_s": run.grace.spent.value,
        "merges": run.merges,
        "merges_per_min": advice.merges_per_minute(now),
        "effective_h": advice.effective_h,
        "sync_every": run.config.algorithm.sync_every,
        "versions": [n for _, n in run.versions],  # merges of each fragment
        "tokens_merged": run.tokens_merged,
        "refusals": run.refusals,
        "fenced": run.fenced,
        "averaged": sorted(run.layout.averaged) if run.layout else [],
        "warnings": list(run.warned.values()),
        "learners": {name: _learner(one, run, now) for name, one in sorted(run.members.items())},
    }


def _round(round_: Round, now: float) -> dict[str, Any]:
    """One open round, or one being merged (`merging`)."""
    deadline = round_.deadline
    return {
        "round": round_.number,
        "fragment": round_.fragment,
        "age_s": now - round_.opened_s,
        "roster": list(round_.roster),
        "contributed": sorted([*round_.contributions, *round_.finals]),
        "quorum": max(1, min(round_.wanted, len(round_.left) + len(round_.contributions))),
        "grace_left_s": None if deadline is None else max(0.0, deadline - now),
        "reanchor": round_.reanchor,
        "merging": round_.closed_s is not None,
    }


def _learner(member: Member, run: RunState, now: float) -> dict[str, Any]:
    step_s, took = member.steps.value, member.took_part
    return {
        "state": member.state,
        "generation": member.generation,
        "joins": run.generations.get(member.learner, member.generation),
        "step": member.step,
        "steps_per_s": 1.0 / step_s if step_s and member.live else None,
        "tokens": member.account.odometer,
        "tokens_per_s": _rate(member),
        "loss": _mean_loss(member),
        "version_gap": version_gap(member, run),
        "rounds_share": sum(took) / len(took) if took else None,
        "silent_s": now - member.reported_s,
        "rtt_ms": member.rtt_ms,
        "rho_s": member.rho_s,
        "peer": member.peer_address,
        "strategy": member.join.strategy,
        "data_slot": member.data_slot,
        **_tokens(run, member.learner),
        "last_error": member.last_error,
    }


def _tokens(run: RunState, learner: str) -> dict[str, float | None]:
    """Of all its process lives, weighted over fragments by their elements."""
    rows = run.ledger(learner)
    return {
        f"tokens_{kind}": (
            element_weighted([row[kind] for row in rows], run.elements) if run.elements else None
        )
        for kind in ("merged", "lost", "pending")
    }


def _mean_loss(member: Member) -> float | None:
    """Over its last steps; None where they are not finite (it diverged): JSON has no NaN."""
    mean = fmean(member.losses) if member.losses else math.nan
    return mean if math.isfinite(mean) else None


def _rate(member: Member) -> float | None:
    """Tokens per second while stepping."""
    if not member.seconds_stepping:
        return None
    return member.account.odometer / member.seconds_stepping
