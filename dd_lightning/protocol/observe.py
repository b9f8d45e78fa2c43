"""What is told about a run while it runs: status, per-learner figures, what each learner holds."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from dd_lightning.protocol.conductor import Conductor
from dd_lightning.protocol.members import LOST, Member
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
        "rtt_ms_p50": member.rtt_ms,
        "rho": member.rho_s,
        "loss": fmean(member.losses) if member.losses else None,
        "steps_unreported_max": member.coalesced_most + 1 if member.state == LOST else 0,
        "version_gap": version_gap(member, conductor.run),
    }


def version_gap(member: Member, run: RunState) -> int:
    """Merges, over all fragments, that the learner has not applied."""
    return sum(
        max(0, current[1] - max(0, held[1]))
        for current, held in zip(run.versions, member.versions, strict=False)
    )


def status(run: RunState, conductor: Conductor, endgame: Any, now: float) -> dict[str, Any]:
    """A snapshot for the live table and `status.json`."""
    state = "ending" if endgame.ending else "running" if run.started else "waiting"
    return {
        "t_s": now,
        "run_id": run.run_id,
        "epoch": run.epoch,
        "run_clock": run.clock.value,
        "state": state,
        "next_round": run.book.next_round,
        "open_rounds": len(run.book.open),
        "max_in_flight": conductor.openings.limit if run.versions else 1,
        "quorum": run.config.quorum,
        "grace_s": run.grace.spent.value,
        "merges": run.merges,
        "versions": [n for _, n in run.versions],
        "tokens_merged": run.tokens_merged,
        "refusals": run.refusals,
        "averaged": sorted(run.layout.averaged) if run.layout else [],
        "warnings": list(run.warned.values()),
        "learners": {
            learner: {
                "state": member.state,
                "generation": member.generation,
                "step": member.step,
                "tokens": member.account.odometer,
                "tokens_per_s": _rate(member),
                "version_gap": version_gap(member, run),
                "rtt_ms": member.rtt_ms,
                "rounds_share": (
                    sum(member.took_part) / len(member.took_part) if member.took_part else None
                ),
                "last_error": member.last_error,
                "loss": fmean(member.losses) if member.losses else None,
            }
            for learner, member in sorted(run.members.items())
        },
    }


def _rate(member: Member) -> float | None:
    """Tokens per second while stepping."""
    if not member.seconds_stepping:
        return None
    return member.account.odometer / member.seconds_stepping
