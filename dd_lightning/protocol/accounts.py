"""The syncer's token ledger: processed = merged + lost + pending, exactly, per fragment.

One `Account` per incarnation (one process life of a learner). Its odometer T counts tokens; per
fragment, what is settled reaches up to S = max(mark, end of the last merged interval). A merge
covers (S, T at snapshot]; whatever is passed over without a merge is lost, by cause. What is lost
when: an overwrite loses the steps since the snapshot (`overlap`) or, had the learner not been in,
since the last apply (`absent`); mix loses its share (`mixed`); a syncer restart what the checkpoint
did not hold and the learner no longer has (`rollback`); the end of an incarnation what it had not
handed in (`dead`, `unsent`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dd_lightning.protocol.messages import RoundKey

LossSink = Callable[["Account", int, int, str], None]
"""(account, fragment, tokens, cause), called for every loss that is booked."""


@dataclass(slots=True)
class Account:
    """What one incarnation has processed and what became of it, per fragment, in whole tokens."""

    learner: str
    incarnation: str
    fragments: int
    generation: int = 0
    odometer: int = 0
    ended: str = ""  # cause of the end, "" while alive
    closed: bool = False  # the end is booked
    marks: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    merged_upto: list[RoundKey | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("marks", "ends", "merged", "lost"):
            if not getattr(self, name):
                setattr(self, name, [0] * self.fragments)
        if not self.merged_upto:
            self.merged_upto = [None] * self.fragments

    def settled(self, fragment: int) -> int:
        """S: all tokens up to here are merged or lost."""
        return max(self.marks[fragment], self.ends[fragment])

    def pending(self, fragment: int) -> int:
        """Tokens that the learner still holds; 0 once the end of the incarnation is booked."""
        return 0 if self.closed else max(0, self.odometer - self.settled(fragment))

    def saw(self, odometer: int) -> None:
        """The learner has reported an odometer."""
        self.odometer = max(self.odometer, odometer)

    def overlaps(self, fragment: int, odometer: int, tokens: int) -> bool:
        """Whether (odometer − tokens, odometer] holds tokens that are settled already."""
        return odometer - tokens < self.settled(fragment)

    def advance(self, fragment: int, to: int, cause: str, sink: LossSink) -> None:
        """Settle up to `to`: what is passed over is lost. `cause` "" stands for what an
        overwrite loses: overlap after a merged snapshot, absent otherwise."""
        self.saw(to)
        start = self.settled(fragment)
        if to <= start:
            return
        if not cause:
            cause = "overlap" if self.ends[fragment] > self.marks[fragment] else "absent"
        self.lost[fragment] += to - start
        self.marks[fragment] = to
        sink(self, fragment, to - start, cause)

    def merge(
        self, fragment: int, key: RoundKey, odometer: int, tokens: int, sink: LossSink
    ) -> None:
        """A contribution covering (odometer − tokens, odometer] was merged in round `key`.

        It may overtake the learner's own word of an apply before it (two sockets): what lies
        before its interval is then booked here, and the late word finds nothing to book.
        """
        self.saw(odometer)
        self.advance(fragment, odometer - tokens, "", sink)
        self.merged[fragment] += tokens
        self.ends[fragment] = odometer
        self.merged_upto[fragment] = key

    def close(self, sink: LossSink) -> None:
        """Book the end of the incarnation: what is pending is lost."""
        for fragment in range(self.fragments):
            self.advance(fragment, self.odometer, self.ended or "unsent", sink)
        self.closed = True

    def figures(self, fragment: int) -> dict[str, int]:
        """The ledger's row of one fragment."""
        return {
            "processed": self.odometer,
            "merged": self.merged[fragment],
            "lost": self.lost[fragment],
            "pending": self.pending(fragment),
        }

    def state(self) -> dict[str, Any]:
        """Plain values for the syncer's checkpoint."""
        return (
            {name: getattr(self, name) for name in self.__dataclass_fields__}
            | {name: list(getattr(self, name)) for name in ("marks", "ends", "merged", "lost")}
            | {"merged_upto": [list(key) if key else None for key in self.merged_upto]}
        )

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Account:
        """From `state()`."""
        upto = [tuple(key) if key else None for key in state["merged_upto"]]
        lists = {name: list(state[name]) for name in ("marks", "ends", "merged", "lost")}
        return cls(**{**state, **lists, "merged_upto": upto})


@dataclass(slots=True)
class PastLives:
    """Sum of the closed accounts of one learner's processes that another process has followed.

    Exact, and as large after a thousand restarts as after two: such an incarnation is not admitted
    again, so nothing more is ever booked on it."""

    merged: list[int]
    lost: list[int]
    lives: int = 0
    processed: int = 0

    def add(self, account: Account) -> None:
        """Take in a closed account."""
        assert account.closed
        self.lives += 1
        self.processed += account.odometer
        for fragment in range(account.fragments):
            self.merged[fragment] += account.merged[fragment]
            self.lost[fragment] += account.lost[fragment]

    def figures(self, fragment: int) -> dict[str, int]:
        """As an account's; nothing is pending."""
        return {
            "processed": self.processed,
            "merged": self.merged[fragment],
            "lost": self.lost[fragment],
            "pending": 0,
        }

    def state(self) -> dict[str, Any]:
        """Plain values for the syncer's checkpoint, which are the constructor's arguments."""
        return {
            "merged": list(self.merged),
            "lost": list(self.lost),
            "lives": self.lives,
            "processed": self.processed,
        }


def ledger_rows(accounts: Sequence[Account | PastLives], fragments: int) -> list[dict[str, int]]:
    """Sum over the incarnations of one learner, one row per fragment."""
    rows = [dict.fromkeys(("processed", "merged", "lost", "pending"), 0) for _ in range(fragments)]
    for account in accounts:
        for fragment, row in enumerate(rows):
            for key, value in account.figures(fragment).items():
                row[key] += value
    return rows


def element_weighted(values: Sequence[int], elements: Sequence[int]) -> float:
    """Σ_p E_p·value[p] / ΣE_p, in integers until the division."""
    return sum(e * v for e, v in zip(elements, values, strict=True)) / sum(elements)
