"""What holds of a fleet after every event, whatever was lost, killed or cut."""

from __future__ import annotations

from typing import Any

from dd_lightning.protocol.transfer import WINDOW


def check_core(fleet: Any) -> None:
    """The ledger's identity, versions that only grow, rounds that close, state that is bounded."""
    run = fleet.core.run
    for name, account in run.accounts.items():
        booked = sum(account.merged), sum(account.lost), len(fleet.merge_log)
        seen = (account.odometer, account.closed, *booked)
        if fleet.checked.get(name) != seen:  # nothing changes most of the time
            fleet.checked[name] = seen
            check_account(fleet, account)
    for p, version in enumerate(run.versions):
        if p < len(fleet.newest):
            assert version >= fleet.newest[p], f"fragment {p} fell from {fleet.newest[p]}"
    fleet.newest = list(run.versions) or fleet.newest
    held_back = fleet.core.conductor.closing.held_back
    for round_ in run.book.open.values():
        age = fleet.now - round_.opened_s
        most = run.config.timeouts.round + (run.config.timeouts.cut if held_back(round_) else 0)
        assert age <= most + 1e-6, f"round {round_.key} is open for {age} s"
    check_bounded(fleet)


def check_account(fleet: Any, account: Any) -> None:
    """processed = merged + lost + pending, and merged is what the oracle saw merged."""
    for p in range(account.fragments):
        figures = account.figures(p)
        parts = figures["merged"], figures["lost"], figures["pending"]
        assert figures["processed"] == sum(parts) and min(parts) >= 0, figures
        intervals = fleet.intervals.get((account.incarnation, p), [])
        merged = sum(end - start for start, end, _ in intervals)
        assert merged == figures["merged"], (account.incarnation, p, merged, figures)


def check_bounded(fleet: Any) -> None:
    """Nothing that is kept grows with the length of a run."""
    run, conductor = fleet.core.run, fleet.core.conductor
    learners, fragments = len(fleet.specs), max(1, len(run.versions))
    assert not run.actions or not fleet.syncer_up
    assert len(run.book.open) + len(run.book.merging) <= fragments
    assert len(run.early) <= 4 * fragments
    assert all(len(held) <= learners for held in run.early.values())
    assert all(len(held) <= learners for held in run.final_inbox.values())
    assert len(conductor.closing.quorum_times) <= 4 * fragments
    assert len(conductor.bookings.deliveries) <= fragments
    assert len(conductor.bookings.waiting_applies) <= 4 * learners * fragments
    assert len(run.accounts) <= len(fleet.lives)
    assert len(run.sessions) <= 4 * learners
    assert len(conductor.closing.held_merges) <= fragments
    for member in run.members.values():
        assert len(member.rho) <= 4 * fragments and len(member.took_part) <= 4 * fragments
        assert len(member.outbox.waiting) <= fragments >= len(member.outbox.under_way)
    receivers = fleet.core.donations.receivers
    assert len(receivers) <= learners and all(
        0 <= w.transfer.relayed - w.transfer.acknowledged <= WINDOW
        for w in receivers.values()
        if w.transfer is not None
    )
    for life in fleet.current.values():
        assert len(life.link._uploads) <= 2 * fragments


def check_learner(fleet: Any, life: Any) -> None:
    """T - c is never below what the syncer has settled, unless a snapshot was merged that the
    learner has not heard of; then it is what is left once it hears."""
    account = fleet.core.run.accounts.get(life.incarnation)
    if account is None or account.ended or life.ledger is None or not life.alive:
        return
    ledger = life.ledger
    seen = (ledger.odometer, len(life.applied), tuple(account.ends), tuple(account.marks))
    if fleet.checked.get(id(life)) == seen:
        return
    fleet.checked[id(life)] = seen
    for p, state in enumerate(ledger._fragments):
        tokens = state.tokens
        snapshot = state.snapshot
        assert (state.steps == 0) == (tokens == 0), (life.name, p, state.steps, tokens)
        if snapshot is not None and snapshot.round == account.merged_upto[p]:
            tokens = min(tokens, ledger.odometer - snapshot.odometer)
        assert ledger.odometer - tokens >= account.settled(p) or state.reload, (
            f"learner {life.name} would contribute tokens of fragment {p} that are settled: "
            f"{ledger.odometer} - {tokens} < {account.settled(p)}"
        )


def check_progress(fleet: Any) -> None:
    """A live quorum merges: where enough learners train and nothing has been disturbed for long
    enough to open a round and to give up on the silent, there has been a merge."""
    run = fleet.core.run
    algorithm, timeouts = fleet.config.algorithm, fleet.config.timeouts
    needed = fleet.config.quorum if algorithm.on_lost_quorum == "wait" else 1
    able = fleet.syncer_up and run.initialized and len(run.training) >= needed
    if not able or fleet.done is not None or fleet.core.endgame.ending is not None:
        fleet.quorum_since_s = None
        return
    if fleet.quorum_since_s is None:
        fleet.quorum_since_s = fleet.now
    merged_s = fleet.merge_log[-1][0] if fleet.merge_log else 0.0
    idle_s = fleet.now - max(merged_s, fleet.quorum_since_s, fleet.disturbed_s)
    slowest_s = max(spec.step_s * (1 + spec.jitter) for spec in fleet.specs.values())
    starts_s = max(timeouts.start, timeouts.reanchor)  # for those who are awaited
    most_s = starts_s + timeouts.round + (algorithm.sync_every + 8 + 4) * slowest_s
    assert idle_s <= most_s, f"{len(run.training)} learners train, no merge for {idle_s} s"
