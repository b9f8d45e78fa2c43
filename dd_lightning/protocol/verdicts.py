"""What speaks against a contribution, and how contributions and merges stand on the tape."""

from __future__ import annotations

from dd_lightning.protocol.actions import HeldContribution, Merge, MergeResult
from dd_lightning.protocol.members import Member
from dd_lightning.protocol.messages import Contribution
from dd_lightning.protocol.rounds import Round
from dd_lightning.protocol.run_state import RunState

KEPT_VERSIONS = 4  # per fragment, to anchor deltas


def objection(run: RunState, member: Member, message: Contribution) -> str | None:
    """Why a contribution of a current generation is refused whole; None when it is not."""
    assert run.layout is not None
    fragment = message.fragment
    if message.fingerprint != run.layout.fingerprint:
        return "layout"
    if not 0 <= fragment < len(run.versions):
        return "fragment"
    if message.epoch != run.epoch:
        return "epoch"
    ahead = message.round - run.book.next_round
    if message.round < 1 or run.book.fragment_of(message.round) != fragment:
        return "round"
    if ahead >= 4 * len(run.versions):  # as far as one that waits in vain may run ahead
        return "round"
    if message.steps < 1 or message.tokens < 1:
        return "empty"
    if message.base[0] == run.epoch and message.base > run.versions[fragment]:
        return "base"
    if message.base[0] > run.epoch:
        return "base"
    if member.account.overlaps(fragment, message.odometer, message.tokens):
        # its round may have closed, and a merge or the word of an apply overtaken it: then it is
        # late, not wrong
        round_ = run.book.open.get(fragment)
        is_open = round_ is not None and round_.number == message.round
        return "counters" if is_open or message.round >= run.book.next_round else None
    return None


def needs_values(run: RunState, message: Contribution) -> bool:
    """A delta whose base is no longer kept, or of an earlier epoch, cannot be anchored."""
    if message.payload.kind != "delta":
        return False
    current = run.versions[message.fragment]
    if run.anchors_from and message.base[1] < run.anchors_from[message.fragment]:
        return True
    return message.base[0] != current[0] or current[1] - message.base[1] >= KEPT_VERSIONS


def record_contribution(
    run: RunState,
    learner: str,
    generation: int,
    message: Contribution,
    verdict: str,
    arrived_s: float,
    weight: float,
    staleness: int | None = None,
) -> None:
    """To the tape, once the verdict is final; `t_s` is the arrival."""
    run.record(
        "contribution",
        t_s=arrived_s,
        epoch=message.epoch,
        round=message.round,
        fragment=message.fragment,
        learner=learner,
        generation=generation,
        step=message.step,
        steps=message.steps,
        tokens=message.tokens,
        base_version=list(message.base),
        digest=message.payload.digest,
        verdict=verdict,
        weight=weight,
        odometer=message.odometer,
        bytes=message.payload.num_bytes,
        kind=message.payload.kind,
        final=message.final,
        staleness=staleness,
    )


def record_merge(
    run: RunState,
    round_: Round,
    merge: Merge,
    result: MergeResult,
    used: list[HeldContribution],
    now: float,
) -> None:
    """To the tape, and into what each member of the roster is judged by."""
    quorum_s = round_.quorum_s if round_.quorum_s is not None else round_.opened_s
    run.record(
        "merge",
        epoch=merge.epoch,
        round=merge.round,
        fragment=merge.fragment,
        version=list(run.versions[merge.fragment]),
        contributors=[held.learner for held in used],
        weights=[held.weight for held in used],
        quorum_s=quorum_s - round_.opened_s,
        grace_s=(round_.closed_s or now) - quorum_s,
        agreement=result.agreement,
        digest=result.digest,
        tokens_merged=run.tokens_merged,
        reanchor=merge.reanchor,
        last=round_.last,
        outer_norm=result.outer_norm,
        norms=dict(result.norms),
        cosine=result.cosine,
        merge_s=result.seconds,
        opened_s=round_.opened_s,
        clock=dict(run.contains[merge.fragment]),
    )
    for learner in round_.roster:
        member = run.members[learner]
        member.took_part.append(any(held.learner == learner for held in used))
        while len(member.took_part) > 4 * len(run.versions):
            member.took_part.popleft()
