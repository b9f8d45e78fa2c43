"""Where every token went: processed = merged + lost + pending, per learner and fragment.

At the end of a run the tape holds the ledger itself. On a tape that was cut, the account is made
from the contributions merged, the losses booked and the odometers reported so far.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dd_lightning.report.observer import Event, Observer, Round, merge_count, round_key

KINDS = ("processed", "merged", "lost", "pending")
Ledger = list[dict[str, int]]  # one entry of KINDS per fragment


@dataclass(slots=True)
class _Merged:
    fragment: int
    count: int  # n of the version that the merge made


class Tokens(Observer):
    """Follows the tokens of every learner.

    Merges that a restart of the syncer undid no longer count as merged; whether their tokens are
    lost (`rollback`) or pending again is what the tape's later `lost` events say.
    """

    def __init__(self) -> None:
        self.elements: list[int] = []  # trainable elements per fragment
        self.lost_by_cause: dict[str, Counter[str]] = defaultdict(Counter)  # raw, all fragments
        self._final: dict[str, Ledger] = {}
        self._lost: Counter[tuple[str, int]] = Counter()
        self._merges: dict[Round, _Merged] = {}
        self._accepted: dict[Round, Counter[str]] = defaultdict(Counter)
        self._lost_at: dict[str, tuple[Any, Any]] = {}  # by the time a cut was recorded
        self._reduced: Counter[str] = Counter()  # merged by steps of a data-parallel run
        self._unsafe: list[Event] = []  # those steps since the last checkpoint

    def on_layout(self, event: Event) -> None:
        self.elements = [int(count) for count in event["elements"]]

    def on_syncer_start(self, event: Event) -> None:
        """A new epoch begins at the versions of a checkpoint: newer merges are undone. Restored
        as a whole from a cut, the losses since it are undone too: that work is done once more."""
        self._final.clear()
        if event.get("restored_from") in self._lost_at:
            self._lost, self.lost_by_cause = copy.deepcopy(self._lost_at[event["restored_from"]])
        kept = [merge_count(version) for version in event["versions"]]
        for key, merge in list(self._merges.items()):
            if merge.fragment >= len(kept) or merge.count > kept[merge.fragment]:
                del self._merges[key]
        for key in [key for key in self._accepted if key not in self._merges]:
            del self._accepted[key]

    def on_cut(self, event: Event) -> None:
        if event["state"] == "recorded":
            self._lost_at[event["cut"]] = copy.deepcopy((self._lost, self.lost_by_cause))

    def on_contribution(self, event: Event) -> None:
        if event["verdict"] == "accepted":
            self._accepted[round_key(event)][str(event["learner"])] += event["tokens"]

    def on_merge(self, event: Event) -> None:
        count = merge_count(event["version"])
        self._merges[round_key(event)] = _Merged(event["fragment"], count)

    def on_all_reduce(self, event: Event) -> None:
        self._unsafe.append(event)
        for learner, tokens in zip(event["members"], event["tokens"], strict=True):
            self._reduced[str(learner)] += tokens

    def on_checkpoint(self, event: Event) -> None:
        self._unsafe.clear()

    def on_rewind(self, event: Event) -> None:
        """What was lost by it is said by `lost` events."""
        for step in self._unsafe:
            for learner, tokens in zip(step["members"], step["tokens"], strict=True):
                self._reduced[str(learner)] -= tokens
        self._unsafe.clear()

    def on_lost(self, event: Event) -> None:
        learner = str(event["learner"])
        self._lost[learner, event["fragment"]] += event["tokens"]
        weight = self.elements[event["fragment"]] if self.elements else 1
        self.lost_by_cause[learner][event["cause"]] += event["tokens"] * weight

    def on_ledger(self, event: Event) -> None:
        self._final[str(event["learner"])] = [
            {kind: int(entry[kind]) for kind in KINDS} for entry in event["fragments"]
        ]

    @property
    def weights(self) -> list[int]:
        """What a fragment counts for: its trainable elements."""
        return self.elements if sum(self.elements) else [1] * len(self.elements)

    def ledger(self, learner: str, odometer: int) -> Ledger:
        """The learner's account, one entry per fragment, in whole tokens.

        Args:
            odometer: tokens the learner is known to have processed, over all incarnations; used
                where the run has not written its own ledger.
        """
        if learner in self._final:
            return self._final[learner]
        merged: Counter[int] = Counter()
        for key, merge in self._merges.items():
            merged[merge.fragment] += self._accepted.get(key, Counter())[learner]
        merged[0] += self._reduced[learner]
        settled = [
            (merged[fragment], self._lost[learner, fragment])
            for fragment in range(len(self.elements))
        ]
        processed = max([odometer, *(sum(pair) for pair in settled)])
        return [
            {"processed": processed, "merged": m, "lost": lost, "pending": processed - m - lost}
            for m, lost in settled
        ]

    def totals(self, ledgers: Sequence[Ledger]) -> dict[str, int]:
        """Σ_p E_p·tokens[p] over `ledgers`, in integers; divide by `scale` for tokens."""
        return {
            kind: sum(
                weight * entry[kind]
                for ledger in ledgers
                for weight, entry in zip(self.weights, ledger, strict=False)
            )
            for kind in KINDS
        }

    @property
    def scale(self) -> int:
        """ΣE_p, at least 1."""
        return max(1, sum(self.weights))
