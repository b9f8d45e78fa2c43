"""One learner of a fleet in virtual time (`tests/fleet.py`): the real LearnerLink and LearnerLedger
on a toy model of one float64 scalar a fragment; an inner step pulls every scalar towards 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dd_lightning.protocol import learner_link as link_
from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.ledger import LearnerLedger

MESSAGES_FIRST, BOUNDARY, TICK = 0, 1, 2  # order of what happens at one instant
RATE = 0.01


@dataclass
class Spec:
    """One learner: when it starts, how fast and how long it trains, its link."""

    start: float = 0.0
    step_s: float = 1.0
    steps: int = 100
    tokens: int = 10
    latency: float = 0.5  # one way
    transfer: float = 0.0  # of a payload, either way; payloads of a direction queue
    down: float | None = None  # transfer of a payload from the syncer, when it differs
    jitter: float = 0.0  # of step durations, relative
    loss: float = 0.0  # of messages without a payload
    repeat: float = 0.0


class Toy:
    """`Values` of one scalar a fragment."""

    def __init__(self, fragments: int, start: float) -> None:
        self.theta = [torch.tensor([start], dtype=torch.float64) for _ in range(fragments)]

    def read(self, fragment: int) -> dict[str, torch.Tensor]:
        return {f"w{fragment:03d}": self.theta[fragment].clone()}

    def write(self, fragment: int, tensors) -> None:
        self.theta[fragment].copy_(tensors[f"w{fragment:03d}"])

    def dtype(self, name: str) -> torch.dtype:
        return torch.float64


@dataclass
class Life:
    """One process life of a learner."""

    fleet: Any
    name: str
    spec: Spec
    incarnation: str
    step0: int = 0
    part: dict | None = None  # of a cut: what it is restored from
    order: msg.TakeCut | None = None
    recorded: msg.CutRecorded | None = None
    takeover: bool = False
    may_fail: bool = False  # another process has its id, or may take it
    failed: str = ""
    toy: Toy | None = None
    ledger: LearnerLedger | None = None
    link: LearnerLink = None  # type: ignore[assignment]
    session: str = ""
    alive: bool = True
    training: bool = False
    ended: bool = False  # left in good order
    told: bool = False  # FinishNow
    paused_until: float = 0.0
    steps: int = 0
    cut_until: float = 0.0
    busy_up: float = 0.0
    waited: int = 0
    ticks: set = field(default_factory=set)
    applied: list = field(default_factory=list)  # (time, fragment, version, newest version)
    newest: dict = field(default_factory=dict)

    def begin(self, now: float) -> None:
        fragments = self.fleet.config.algorithm.fragments
        tensors = tuple(msg.TensorInfo(f"w{i:03d}", (1,)) for i in range(fragments))
        self.toy = Toy(fragments, 1.0 + int(self.name) % 7)
        join = msg.Join(
            learner=self.name, incarnation=self.incarnation, number=0, tensors=tensors,
            dtype="float64", step=self.step0, host="h", pid=1, takeover=self.takeover,
        )  # fmt: skip
        if self.part is not None:
            join = self.fleet.cuts.join_of(self, join)
        self.link = LearnerLink(join, now=now, address="virtual", connect_timeout_s=1e6)
        self.connect(now)

    def connect(self, now: float) -> None:
        if not self.alive or self.ended:
            return
        if now < self.cut_until or not self.fleet.syncer_up:
            self.fleet.at(now + 1.0, lambda t: self.connect(t))
            return
        self.session = f"{self.name}.{next(self.fleet.serial)}"
        self.fleet.session_of[self.session] = self
        self.busy_up = now
        self.link.connected(now)
        self.pump(now)

    def receive(self, session: str, message: msg.Message, payload: object, now: float) -> None:
        if self.alive and session == self.session and now >= self.cut_until:
            self.link.receive(message, payload, now)
            self.pump(now)

    def pump(self, now: float) -> None:
        """Carry out what the link wants; then the uploads that its data channel takes."""
        for action in self.link.take():
            if isinstance(action, link_.Send):
                self.fleet.to_syncer(self, action.message, None, now)
            elif isinstance(action, link_.Deliver):
                self.deliver(action.message, action.payload, now)
            elif isinstance(action, link_.Reconnect):
                self.fleet.close(self, now)
                self.fleet.at(now + 1.0, lambda t: self.connect(t))
            else:
                assert self.may_fail, action.reason
                self.failed = action.reason
                self.kill(now)
                return
        if now >= self.busy_up and (upload := self.link.next_upload()) is not None:
            payload, kind = upload.values, "values"
            if isinstance(upload, Snapshot) and upload.anchor is not None:
                payload = {name: upload.anchor[name] - t for name, t in upload.values.items()}
                kind = "delta"
            info = msg.Payload(codec="none", kind=kind, parts=(), num_bytes=8, digest="0")
            self.fleet.to_syncer(self, self.link.stamp(upload, info), payload, now)
            self.busy_up = now + self.spec.transfer
            self.fleet.at(self.busy_up, lambda t: self.pump(t) if self.alive else None)
        deadline = self.link.next_deadline()
        if deadline is not None and self.alive and deadline not in self.ticks:
            self.ticks.add(deadline)
            self.fleet.at(deadline, self.tick)

    def tick(self, now: float) -> None:
        self.ticks.discard(now)
        if self.alive and not self.ended:
            due = self.link.next_deadline()
            if due is not None and due <= now:
                self.link.tick(now)
                self.pump(now)

    def deliver(self, message: msg.Message, payload, now: float) -> None:
        if isinstance(message, msg.Welcome):
            if self.ledger is None:
                self.ledger = LearnerLedger.from_config(
                    self.toy,
                    self.fleet.config,
                    len(message.fragments),
                    step=self.step0,
                    deltas=self.fleet.deltas,
                )
                if message.cut:
                    self.fleet.cuts.resume(self, message)
            if not message.cut:
                self.ledger.attach(message)
            if message.reload:
                self.ledger.reload()
            if message.send_initial:
                self.hand_in_initial()
        elif isinstance(message, msg.SendInitial):
            self.hand_in_initial()
        elif isinstance(message, msg.Fragment):
            self.ledger.on_fragment(message, payload)
        elif isinstance(message, msg.Pull):
            self.ledger.on_pull(message, now)
        elif isinstance(message, msg.Closed):
            self.ledger.on_closed(message.fragment, message.round)
        elif isinstance(message, msg.Verdict):
            if message.reload:
                self.ledger.reload()
        elif isinstance(message, msg.TakeCut):
            self.order = message
            self.fleet.cuts.ordered(self, now)
        elif isinstance(message, msg.CutOver):
            if self.order is not None and self.order.cut == message.cut:
                self.order = None
        elif isinstance(message, msg.FinishNow):
            self.told = True
        elif isinstance(message, msg.Released):
            self.leave(now)
            return
        if self.ledger is None:
            return
        waiting_for = not self.training or self.ledger.finishing or self.waited
        if waiting_for or now < self.paused_until:
            self.fleet.at(now, lambda t: self.boundary(t, False), BOUNDARY)

    def hand_in_initial(self) -> None:
        for p in range(len(self.toy.theta)):
            self.link.initial(p, self.toy.read(p))

    def boundary(self, now: float, stepped: bool) -> None:
        """After a step; or, while nothing steps (loading, waiting, finished), after a delivery."""
        if not self.alive or self.ended or self.ledger is None:
            return
        for out in self.ledger.boundary(now):
            if isinstance(out, Snapshot):
                self.link.contribute(out)
            else:
                if isinstance(out, msg.Applied):
                    self.saw_apply(out, now)
                self.link.say(out)
        if not self.training:
            if self.ledger.loaded:
                self.training = True
                self.link.report(self.ledger.held(), now)
                self.next_step(now)
        elif stepped:
            waits = self.ledger.must_wait(now)
            self.link.report(
                self.ledger.held(), now, step_seconds=self.spec.step_s,
                state="waiting" if waits else "training",
            )  # fmt: skip
            self.after_step(now, waits)
        elif self.ledger.finishing:
            self.link.report(self.ledger.held(), now)
        elif self.waited and not self.ledger.must_wait(now):
            self.waited = 0
            self.link.report(self.ledger.held(), now)
            self.next_step(now)
        elif self.ledger.loaded:
            self.link.report(self.ledger.held(), now)
        self.pump(now)

    def saw_apply(self, applied: msg.Applied, now: float) -> None:
        """Versions only grow; how old the values were is kept."""
        p, run = applied.fragment, self.fleet.core.run
        assert applied.version > self.newest.get(p, (-1, -1)), "an older version was applied"
        self.newest[p] = applied.version
        self.applied.append((now, p, applied.version, run.versions[p] if run.versions else None))

    def after_step(self, now: float, waits: bool) -> None:
        if waits and not (self.told or self.steps >= self.spec.steps):
            self.waited += 1
            deadline = self.ledger.wait_deadline
            self.fleet.at(deadline + 1e-9, lambda t: self.boundary(t, False), BOUNDARY)
        elif self.told or self.ledger.step >= self.spec.steps:
            self.ledger.finish()
            self.link.finish(self.ledger.held(), "done", now)
            self.fleet.at(now, lambda t: self.boundary(t, False), BOUNDARY)
        else:
            self.next_step(now)

    def next_step(self, now: float) -> None:
        self.fleet.cuts.batch_ends(self, now)
        begin = max(now, self.paused_until)
        if begin > now:
            self.link.report(self.ledger.held(), now, state="paused")
        noise = self.fleet.random.uniform(-1, 1) * self.spec.jitter
        self.fleet.at(begin + self.spec.step_s * (1 + noise), self.step, BOUNDARY)

    def step(self, now: float) -> None:
        if not self.alive or self.ended:
            return
        if now < self.paused_until:
            self.fleet.at(self.paused_until, self.step, BOUNDARY)
            return
        for theta in self.toy.theta:
            theta -= RATE * theta
        self.steps += 1
        self.ledger.stepped(self.spec.tokens)
        self.fleet.processed[self.incarnation] = self.ledger.odometer
        self.boundary(now, True)

    def goodbye(self, now: float) -> None:
        """Leaves now, though it has steps to do."""
        self.link.goodbye("leaves")
        self.pump(now)
        self.leave(now)

    def leave(self, now: float) -> None:
        self.ended = True
        self.fleet.close(self, now)

    def kill(self, now: float) -> None:
        self.alive = False
        self.fleet.close(self, now)
