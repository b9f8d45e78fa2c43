"""A learner's ledger as its part of a consistent cut: plain values and tensors, and back.

Snapshots, bases and anchors are never changed in place, so the record shares them. What has arrived
and is not applied, and pulls that wait, are left out: both are sent again after a restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dd_lightning.protocol.held import FragmentState, Snapshot
from dd_lightning.protocol.messages import RoundKey, Welcome

if TYPE_CHECKING:
    from dd_lightning.protocol.ledger import LearnerLedger

PLAIN = ("fragment", "step", "steps", "tokens", "odometer", "boundary_wait_s", "final", "unasked")


def own_clock(ledger: LearnerLedger) -> int:
    """Own schedule clock: inner steps counted from the run's clock when it was admitted."""
    return ledger.step + ledger._schedule.clock_base


def record_cut(ledger: LearnerLedger, cut: str) -> dict[str, Any]:
    """All that decides what the learner does next; what it sends from here on is stamped.

    `torch.load(weights_only=True)` takes it."""
    ledger.cut = cut
    schedule = ledger._schedule
    return {
        "step": ledger.step,
        "odometer": ledger.odometer,
        "epoch": ledger.epoch,
        "schedule": [
            schedule.clock_base,
            schedule.offset,
            schedule.next_round,
            schedule.patient,
        ],
        "fragments": [_recorded_fragment(state) for state in ledger._fragments],
    }


def restore_cut(ledger: LearnerLedger, record: Mapping[str, Any], welcome: Welcome) -> None:
    """Admitted as part of the run restored from that cut: go on where the record was made, under
    the new epoch, whose keys those of the record's epoch become."""
    epoch = welcome.epoch

    def moved(key: Any) -> RoundKey:
        return (epoch if key[0] == record["epoch"] else key[0], key[1])

    ledger.step, ledger.odometer = record["step"], record["odometer"]
    ledger.epoch = epoch
    schedule = ledger._schedule
    schedule.clock_base, schedule.offset, schedule.next_round, schedule.patient = record["schedule"]
    for state, row in zip(ledger._fragments, record["fragments"], strict=True):
        state.version, state.closed = moved(row["version"]), moved(row["closed"])
        state.steps, state.tokens, state.reload = row["steps"], row["tokens"], row["reload"]
        state.base, state.anchor = row["base"], row["anchor"]
        state.settled = None if row["settled"] is None else moved(row["settled"])
        awaited = row["awaited"]
        state.awaited = None if awaited is None else (moved(awaited[0]), awaited[1])
        found = row["snapshot"]
        state.snapshot = None if found is None else Snapshot(
            round=moved(found["round"]),
            base=moved(found["base"]),
            values=found["values"],
            anchor=found["anchor"],
            reference=found["reference"],
            **{name: found[name] for name in PLAIN},
        )  # fmt: skip
    for state, merged_upto in zip(ledger._fragments, welcome.merged_upto, strict=True):
        state.settle(merged_upto, ledger.step, ledger.odometer)


def held_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a join states of the record: `step`, `odometer`, `versions` and `pending`."""
    rows = record["fragments"]
    return {
        "step": record["step"],
        "odometer": record["odometer"],
        "versions": tuple(tuple(row["version"]) for row in rows),
        "pending": tuple((row["steps"], row["tokens"]) for row in rows),
    }


def _recorded_fragment(state: FragmentState) -> dict[str, Any]:
    snapshot = state.snapshot
    return {
        "version": list(state.version),
        "closed": list(state.closed),
        "steps": state.steps,
        "tokens": state.tokens,
        "reload": state.reload,
        "base": _tensors(state.base),
        "anchor": _tensors(state.anchor),
        "settled": None if state.settled is None else list(state.settled),
        "awaited": None if state.awaited is None else [list(state.awaited[0]), state.awaited[1]],
        "snapshot": None if snapshot is None else {
            "round": list(snapshot.round),
            "base": list(snapshot.base),
            "values": _tensors(snapshot.values),
            "anchor": _tensors(snapshot.anchor),
            "reference": _tensors(snapshot.reference),
            **{name: getattr(snapshot, name) for name in PLAIN},
        },
    }  # fmt: skip


def _tensors(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if found is None else dict(found)
