"""Rounds of a run: merges, who contributed, and each learner's share, from a tape."""

from __future__ import annotations

from collections import Counter

from dd_lightning.report.observer import Event, Observer, Round, learner_ids, round_key, spread


class Rounds(Observer):
    """Counts merges, re-anchors, last rounds and those that a restart undid included.

    A learner's share is contributed / offered. A merged round was offered to it if it contributed,
    or if it was in the roster at the opening and trained under that generation until the merge: a
    member that paused, finished, left or died in between was not there to contribute. Cancelled
    rounds and rounds never merged count for nobody.
    """

    def __init__(self) -> None:
        self.merges: Counter[int] = Counter()  # per fragment
        self.contributors: Counter[int] = Counter()  # number of contributors to number of merges
        self.contributed: Counter[str] = Counter()
        self.offered: Counter[str] = Counter()
        self._num_fragments = 0
        self._open: dict[Round, set[str]] = {}

    def on_layout(self, event: Event) -> None:
        self._num_fragments = len(event["fragments"])

    def on_syncer_start(self, event: Event) -> None:
        self._open.clear()  # rounds open at a restart are skipped

    def on_round_open(self, event: Event) -> None:
        self._open[round_key(event)] = set(learner_ids(event["roster"]))

    def on_round_cancelled(self, event: Event) -> None:
        self._open.pop(round_key(event), None)

    def _absent(self, event: Event) -> None:
        for members in self._open.values():
            members.discard(str(event["learner"]))

    def on_join(self, event: Event) -> None:
        self._absent(event)

    def on_leave(self, event: Event) -> None:
        self._absent(event)

    def on_dead(self, event: Event) -> None:
        self._absent(event)

    def on_state(self, event: Event) -> None:
        if event["state"] != "training":
            self._absent(event)

    def on_merge(self, event: Event) -> None:
        contributors = set(learner_ids(event["contributors"]))
        self.merges[event["fragment"]] += 1
        self.contributors[len(contributors)] += 1
        self.contributed.update(contributors)
        self.offered.update(contributors | self._open.pop(round_key(event), set()))

    def on_all_reduce(self, event: Event) -> None:
        """A step of a data-parallel run is a merge of everything, by whoever was there."""
        members = set(learner_ids(event["members"]))
        self.merges[0] += 1
        self.contributors[len(members)] += 1
        self.contributed.update(members)
        self.offered.update(members)

    def on_rewind(self, event: Event) -> None:
        """The steps since are made again: Θ has seen so many."""
        self.merges[0] = event["step"]

    @property
    def num_merges(self) -> int:
        """Merges on the tape."""
        return self.merges.total()

    @property
    def per_fragment(self) -> list[int]:
        """Merges of each fragment; fragments that were never merged included."""
        known = max(self._num_fragments, 1 + max(self.merges, default=-1))
        return [self.merges[fragment] for fragment in range(known)]

    @property
    def contributor_spread(self) -> dict[str, float | None]:
        """Contributors per merge: min, mean, max."""
        if not self.contributors:
            return spread([])
        total = sum(size * merges for size, merges in self.contributors.items())
        return {
            "min": min(self.contributors),
            "mean": total / self.contributors.total(),
            "max": max(self.contributors),
        }

    def share(self, learner: str) -> float:
        """Contributed / offered; 0 for a learner to which no merged round was offered."""
        offered = self.offered[learner]
        return self.contributed[learner] / offered if offered else 0.0
