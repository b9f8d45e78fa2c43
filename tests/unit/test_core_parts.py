"""Parts of the core that decide: estimates, run clock, rounds, outbox, accounts, vector clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from dd_lightning.protocol.accounts import Account, element_weighted, ledger_rows
from dd_lightning.protocol.estimates import (
    GraceEstimator,
    Lateness,
    MovingAverage,
    StepTime,
    in_flight_bound,
    lateness_window,
)
from dd_lightning.protocol.members import RunClock
from dd_lightning.protocol.outbox import Outbox
from dd_lightning.protocol.rounds import Asked, Round, RoundBook
from dd_lightning.protocol.vector_clock import VectorClock

pytestmark = pytest.mark.unit


# ---------------------------------------------------------------- estimates


def test_the_first_sample_seeds_a_moving_average() -> None:
    average = MovingAverage()
    assert average.value is None
    average.add(8.0)
    assert average.value == 8.0
    average.add(0.0)
    assert average.value == 8.0 * (1 - 0.125)


def test_a_pause_is_no_step_time_but_a_lasting_change_is() -> None:
    step = StepTime()
    for _ in range(20):
        step.add(1.0)
    step.add(60.0)
    assert step.value == 1.0
    assert step.quantile(0.99) == 60.0  # the quantiles keep it
    for _ in range(40):
        step.add(10.0)
    assert 8.0 < step.value <= 10.0


def test_lateness_is_mean_and_three_deviations() -> None:
    late = Lateness()
    assert late.bound is None
    late.add(1.0)
    assert late.bound == 1.0
    late.add(2.0)  # deviation |2 - 1| seeds; mean 1.125
    assert late.bound == 1.125 + 3.0


@pytest.mark.parametrize(
    ("bounds", "window"),
    [([], 0.0), ([0.5, 1.5], 1.5), ([0.5, 9.0], 0.5), ([9.0], 0.0), ([0.5, None], 4.0)],
)
def test_the_lateness_window(bounds, window) -> None:
    """The largest that does not exceed the cap; a straggler beyond it is left out."""
    assert lateness_window(bounds, 4.0) == window


def test_the_grace_window_of_each_rule() -> None:
    def window(rule: str, bounds: list, step: float | None = 1.0) -> float:
        grace = GraceEstimator(rule, safety=0.8, overlap=2, cap_steps=4.0)
        grace.quorum.add(0.5)
        grace.sync.add(0.5)
        return grace.window(step, step, bounds)

    assert window("paper", [2.0]) == pytest.approx(0.8 * (2 * 1.0 - 0.5 - 0.5))
    assert window("lateness", [2.0]) == 2.0
    assert window("lateness", [0.1]) == pytest.approx(0.8)
    assert window("lateness", [None]) == 4.0
    assert window("none", [2.0]) == 0.0
    assert window("lateness", [2.0], step=None) == 0.0


@pytest.mark.parametrize(
    ("rho", "step", "grace", "transfer", "bound"),
    [
        (None, 1.0, 0.0, 0.0, 1),
        (3.0, None, 0.0, 0.0, 1),
        (0.5, 1.0, 0.0, 0.0, 2),
        (3.0, 1.0, 1.5, 0.0, 6),
        (10.0, 1.0, 0.0, 0.0, 11),
        (100.0, 1.0, 0.0, 0.0, 24),
        (5.0, 1.0, 0.0, 2.0, 3),  # the uplink takes one each two steps
    ],
)
def test_the_in_flight_bound(rho, step, grace, transfer, bound) -> None:
    assert in_flight_bound(rho, step, grace, transfer, sync_every=24, fragments=24) == bound


# ---------------------------------------------------------------- run clock and rounds


@dataclass
class Stepper:
    """As much of a Member as the run clock reads."""

    step: int
    clock_base: int | None = 0

    @property
    def clock(self) -> int | None:
        return None if self.clock_base is None else self.clock_base + self.step


@pytest.mark.parametrize(("quorum", "clock"), [(1, 30), (2, 20), (3, 10), (9, 10)])
def test_the_run_clock_is_the_kth_largest(quorum, clock) -> None:
    members = [Stepper(10), Stepper(30), Stepper(20), Stepper(99, clock_base=None)]
    assert RunClock(quorum).update(members) == clock


def test_the_run_clock_never_falls_and_drags_along_who_is_behind() -> None:
    clock = RunClock(1)
    slow, fast = Stepper(3), Stepper(40)
    clock.update([slow, fast])
    assert (clock.value, slow.clock) == (40, 32)
    assert slow.step == 3  # the learner's own count is never altered
    assert clock.update([slow]) == 40 and slow.clock == 32
    assert clock.update([]) == 40
    slow.step += 9
    assert clock.update([slow]) == 41


def test_a_round_is_due_in_whole_numbers() -> None:
    book = RoundBook(fragments=7, sync_every=24)
    due = [math.ceil(r * 24 / 7) for r in range(1, 50)]
    for number, step in enumerate(due, start=1):
        book.next_round = number
        assert not book.due(step - 1) and book.due(step)


def test_a_lag_is_skipped_without_a_gap_in_numbers() -> None:
    book = RoundBook(fragments=4, sync_every=8)
    book.skip_lag(10)  # C·P = 40, the next opening at 8: exactly H·P behind is no lag yet
    assert book.offset == 0
    book.skip_lag(100)
    assert book.offset == 400 - 8 and book.due(100)
    book.next_round += 1
    assert not book.due(101) and book.due(102)  # no burst
    assert book.fragment_of(book.next_round) == 1


def test_the_next_number_of_a_fragment() -> None:
    book = RoundBook(fragments=4, sync_every=8, next_round=7)
    assert [book.next_number_of(p) for p in range(4)] == [9, 10, 7, 8]
    assert all(book.fragment_of(book.next_number_of(p)) == p for p in range(4))


@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_the_quorum_is_the_least_of_k_and_who_is_left_or_has_contributed(wanted) -> None:
    for left in range(4):
        for contributed in range(4):
            round_ = Round(1, 1, 0, opened_s=0.0, wanted=wanted)
            round_.left = {str(i): Asked(1, 0.0, 0.0) for i in range(left)}
            round_.contributions = {f"c{i}": None for i in range(contributed)}
            quorum = max(1, min(wanted, left + contributed))  # protocol.md's K_r
            assert round_.has_quorum == (contributed >= quorum)
            assert round_.empty == (left == contributed == 0)
    waiting = Round(1, 1, 0, opened_s=0.0, wanted=wanted, degrade=False)
    assert waiting.unreachable


# ---------------------------------------------------------------- outbox


def test_only_the_newest_unsent_version_waits() -> None:
    box = Outbox()
    for fragment in (2, 0, 2, 2):
        box.offer(fragment)
    assert box.next(window=1) == 2
    box.sent(2, (1, 5), now=1.0)
    box.offer(2)  # a newer version while the older is under way
    assert box.next(window=1) is None and box.next(window=2) == 0
    box.sent(0, (1, 3), now=2.0)
    assert box.next(window=3) is None  # fragment 2 again only once it has arrived
    assert box.received(2, (1, 4)) is None and box.received(2, (1, 5)) == 1.0
    assert box.next(window=3) == 2
    assert box.expire(before=3.0) == [0] and set(box.waiting) == {2, 0}
    box.withdraw(2)
    assert box.next(window=3) == 0


# ---------------------------------------------------------------- accounts


def test_intervals_and_causes() -> None:
    lost: list[tuple[int, int, str]] = []
    account = Account("0", "a", 1)
    sink = lambda _, p, tokens, cause: lost.append((p, tokens, cause))  # noqa: E731
    account.saw(100)
    account.merge(0, (1, 1), odometer=80, tokens=80, sink=sink)
    account.advance(0, 100, "", sink)  # overwritten after the merged snapshot
    account.saw(150)
    account.advance(0, 150, "", sink)  # overwritten without having been in
    account.saw(170)
    account.advance(0, 160, "mixed", sink)
    assert lost == [(0, 20, "overlap"), (0, 50, "absent"), (0, 10, "mixed")]
    assert account.figures(0) == {"processed": 170, "merged": 80, "lost": 80, "pending": 10}
    assert account.overlaps(0, 170, 11) and not account.overlaps(0, 170, 10)
    account.advance(0, 120, "", sink)  # late word of an old apply
    assert len(lost) == 3
    account.ended = "dead"
    account.close(sink)
    assert lost[-1] == (0, 10, "dead") and account.pending(0) == 0


def test_a_contribution_that_overtakes_word_of_an_apply_books_the_gap() -> None:
    lost = []
    account = Account("0", "a", 1)
    account.merge(0, (1, 1), 50, 30, lambda _, p, tokens, cause: lost.append((tokens, cause)))
    assert lost == [(20, "absent")] and account.figures(0)["merged"] == 30


def test_an_account_survives_a_checkpoint() -> None:
    account = Account("0", "a", 2, generation=3)
    account.merge(1, (1, 4), 50, 50, lambda *_: None)
    assert Account.restore(account.state()) == account


def test_rows_sum_over_incarnations_and_elements_weigh() -> None:
    first, second = Account("0", "a", 2), Account("0", "b", 2)
    for account, odometer in ((first, 10), (second, 30)):
        account.merge(1, (1, 1), odometer, odometer, lambda *_: None)
    rows = ledger_rows([first, second], 2)
    assert rows[0] == {"processed": 40, "merged": 0, "lost": 0, "pending": 40}
    assert rows[1] == {"processed": 40, "merged": 40, "lost": 0, "pending": 0}
    assert element_weighted([0, 40], [1, 3]) == 30.0


# ---------------------------------------------------------------- vector clock


def test_vector_clocks_order_what_contains_what() -> None:
    a = VectorClock({"0": 3, "1": 5})
    b = a.advanced("0", 4)
    assert a <= b and not b <= a and not a.concurrent(b)
    assert b.advanced("0", 1) == b  # counts only grow
    c = a.advanced("2", 1)
    assert b.concurrent(c)
    assert dict(b.merged(c)) == {"0": 4, "1": 5, "2": 1}
    assert b <= b.merged(c) and c <= b.merged(c)
    assert a["9"] == 0 and list(c) == ["0", "1", "2"]
