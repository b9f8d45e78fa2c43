"""Advice to the operator, from what a run measures of itself: each sentence once, with its remedy.

Who contributes to too few rounds and why; fragments merged less often than every H steps; merged
fragments that reach their learners so late that much of the work is overwritten.
"""

from __future__ import annotations

import math
from collections import deque

from dd_lightning.protocol.estimates import MovingAverage
from dd_lightning.protocol.members import TRAINING, Member, median_step
from dd_lightning.protocol.messages import Applied, Contribution, RoundKey
from dd_lightning.protocol.run_state import RunState

SLOW_FACTOR = 1.5  # a step so much above the median names the step, else the link
SPARSE_FACTOR = 1.25  # effective H above so many H
LATE_SHARE = 0.2  # snapshot to apply above so much of H
ROUNDS_SEEN = 4  # merges per fragment before anything is said
RATE_S = 60.0  # merges a minute are counted over the last so many seconds
RATE_MERGES = 256  # at most


class Advice:
    """Watches contributions, merges and applies; speaks through `RunState.warn_once`."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.snapshots: dict[tuple[str, int], tuple[RoundKey, int]] = {}  # to round and step
        self.latency = MovingAverage()  # snapshot to apply, in steps
        self.began: tuple[int, int] | None = None  # run clock and merges at the first merge seen
        self.merged_s: deque[float] = deque(maxlen=RATE_MERGES)

    @property
    def window(self) -> int:
        """Merges over which is judged: 4P."""
        return ROUNDS_SEEN * max(1, len(self.run.versions))

    def contributed(self, member: Member, message: Contribution) -> None:
        """Remember at which step the newest snapshot of a fragment was taken."""
        key = (message.epoch, message.round)
        self.snapshots[(member.learner, message.fragment)] = (key, message.step)

    def applied(self, member: Member, message: Applied) -> None:
        """A merged snapshot has come back to its learner."""
        taken = self.snapshots.get((member.learner, message.fragment))
        if message.settled is None or taken is None or taken[0] != message.settled:
            return
        self.latency.add(message.step - taken[1])
        late, every = self.latency.value or 0.0, self.run.config.algorithm.sync_every
        if self.run.merges >= self.window and late > LATE_SHARE * every:
            self.run.warn_once(
                "latency",
                f"a merged fragment reaches its learner {late:.1f} steps after the snapshot, more "
                f"than H/5 of algorithm.sync_every={every}, and an overwrite loses those steps: "
                f"sync_every >= {math.ceil(late / LATE_SHARE)}, algorithm.apply=rebase or a faster "
                "link would do",
            )

    @property
    def effective_h(self) -> float | None:
        """Steps of the run clock between two merges of a fragment; None before it can be told."""
        run = self.run
        if self.began is None or run.merges <= self.began[1]:
            return None
        steps, merges = run.clock.value - self.began[0], run.merges - self.began[1]
        return steps * len(run.versions) / merges

    def merges_per_minute(self, now: float) -> float:
        """Over the last minute, or over as much of it as the last merges reach back."""
        while self.merged_s and self.merged_s[0] < now - RATE_S:
            self.merged_s.popleft()
        if len(self.merged_s) < 2 or now <= self.merged_s[0]:
            return 0.0
        return 60.0 * (len(self.merged_s) - 1) / (now - self.merged_s[0])

    def merged(self, now: float) -> None:
        """Are fragments merged about every H steps?"""
        run = self.run
        self.merged_s.append(now)
        if self.began is None:
            self.began = (run.clock.value, run.merges)
        effective, every = self.effective_h, run.config.algorithm.sync_every
        if effective is None or run.merges - self.began[1] < self.window:
            return
        if effective > SPARSE_FACTOR * every:
            run.warn_once(
                "effective_h",
                f"each fragment is merged every {effective:.0f} steps, algorithm.sync_every is "
                f"{every}: set it to {math.ceil(effective)}, or give the links "
                f"{effective / every:.1f} times the bandwidth",
            )

    def name_the_slow(self, member: Member) -> None:
        """A learner that contributes to fewer than half of 4P rounds is named, with the cause."""
        took = member.took_part
        if member.state != TRAINING or len(took) < self.window or sum(took) * 2 >= len(took):
            return
        step, median = member.steps.value, median_step(self.run.training)
        slow_step = step is not None and median is not None and step > SLOW_FACTOR * median
        if slow_step:
            cause = f"its step ({step:.3f} s, median {median:.3f} s)"
        elif member.rho_s is not None:
            cause = f"its link (pull to contribution {member.rho_s:.3f} s)"
        else:  # a pull is answered on the base it names
            every, most = self.run.config.algorithm.sync_every, len(self.run.training)
            cause = (
                "its link: merged fragments reach it after the next merge of them, and its work is "
                f"lost. Raise algorithm.sync_every={every}, or algorithm.quorum to {most}, which "
                "waits for it"
            )
        self.run.warn_once(
            f"slow {member.learner}",
            f"learner {member.learner} contributed to {sum(took)} of {len(took)} rounds; "
            f"cause: {cause}",
        )
