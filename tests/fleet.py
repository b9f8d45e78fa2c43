"""A fleet in virtual time: the real SyncerCore, LearnerLinks and LearnerLedgers, a toy model, and
a network that delays, loses, repeats and cuts. No sockets, no clock, no threads.

Every fragment is one float64 scalar; an inner step pulls it towards 0 with a learner's own noise.
An oracle remembers every token interval that was merged, so that nothing counts twice.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dd_lightning.protocol import actions as act
from dd_lightning.protocol import learner_link as link_
from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.learner_link import InitialValues, LearnerLink
from dd_lightning.protocol.ledger import LearnerLedger
from dd_lightning.protocol.syncer_core import SyncerCore

MESSAGES_FIRST, BOUNDARY, TICK = 0, 1, 2
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

    fleet: Fleet
    name: str
    spec: Spec
    incarnation: str
    step0: int = 0
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
    applied: list = field(default_factory=list)

    def begin(self, now: float) -> None:
        fragments = self.fleet.config.algorithm.fragments
        tensors = tuple(msg.TensorInfo(f"w{i:03d}", (1,)) for i in range(fragments))
        self.toy = Toy(fragments, 1.0 + hash(self.name) % 7)
        join = msg.Join(
            learner=self.name, incarnation=self.incarnation, number=0, tensors=tensors,
            dtype="float64", step=self.step0, host="h", pid=1,
        )  # fmt: skip
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
                raise AssertionError(action.reason)
        if now >= self.busy_up and (upload := self.link.next_upload()) is not None:
            payload = upload.values
            info = msg.Payload(codec="none", kind="values", parts=(), num_bytes=8, digest="0")
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
                    self.toy, self.fleet.config, len(message.fragments), step=self.step0
                )
            self.ledger.attach(message)
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
                    self.applied.append((self.ledger.step, out.fragment, out.version))
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
        self.fleet.check_learner(self)

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

    def leave(self, now: float) -> None:
        self.ended = True
        self.fleet.close(self, now)

    def kill(self, now: float) -> None:
        self.alive = False
        self.fleet.close(self, now)


class Fleet:
    """Syncer, learners and what lies between; `run()` plays it to the end."""

    def __init__(self, specs: list[Spec], seed: int = 0, **config) -> None:
        algorithm = config.pop("algorithm", {})
        self.config = SyncerConfig.load({"learners": len(specs), "algorithm": algorithm, **config})
        self.random = random.Random(seed)
        self.specs = {str(i): spec for i, spec in enumerate(specs)}
        self.now, self.heap, self.serial = 0.0, [], itertools.count()
        self.session_of: dict[str, Life] = {}
        self.lives: list[Life] = []
        self.current: dict[str, Life] = {}
        self.tape: list[dict] = []
        self.processed: dict[str, int] = {}
        self.intervals: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self.warnings: list[str] = []
        self.done: act.Done | None = None
        self.epoch, self.syncer_up = 1, True
        self.theta: list[torch.Tensor] = []
        self.buffer: list[torch.Tensor] = []
        self.saved: dict | None = None
        self.num_events = 0
        self.ticks: set[float] = set()
        self.drop_pulls = 0  # the next so many pulls are lost
        self.hooks: list[Callable[[Fleet], None]] = []
        self.merge_log: list[tuple[float, act.Merge]] = []
        self.down_busy: dict[str, float] = {}
        self.core = SyncerCore(self.config, run_id="r", epoch=1)
        for name, spec in self.specs.items():
            self.at(spec.start, lambda t, name=name: self.start(name, t))

    # ------------------------------------------------------------------ time

    def at(self, time: float, what: Callable[[float], object], order: int = 0) -> None:
        heapq.heappush(self.heap, (time, order, next(self.serial), what))

    def run(self, until: float = 1e5) -> Fleet:
        self.carry_out()
        while self.heap and self.done is None:
            time, _, _, what = heapq.heappop(self.heap)
            if time > until:
                break
            self.now = max(self.now, time)
            self.num_events += 1
            assert self.num_events < 200_000, f"an event storm at t = {self.now}"
            what(self.now)
            self.carry_out()
            self.check()
            for hook in self.hooks:
                hook(self)
        return self

    def start(self, name: str, now: float, step0: int = 0) -> Life:
        life = Life(self, name, self.specs[name], f"{name}-{next(self.serial)}", step0)
        self.lives.append(life)
        self.current[name] = life
        life.begin(now)
        return life

    # ------------------------------------------------------------------ faults

    def kill(self, name: str, back_after: float | None = None, from_step: int = 0) -> None:
        self.current[name].kill(self.now)
        if back_after is not None:
            self.at(self.now + back_after, lambda t: self.start(name, t, from_step))

    def cut(self, name: str, seconds: float, silent: bool = False) -> None:
        """The link is dead for so long; `silent`: neither side sees the connection close."""
        life = self.current[name]
        life.cut_until = self.now + seconds
        if not silent:
            self.close(life, self.now)
            life.link.disconnected(self.now)
            self.at(self.now + seconds, lambda t: life.connect(t))

    def pause(self, name: str, seconds: float) -> None:
        self.current[name].paused_until = self.now + seconds

    def close(self, life: Life, now: float) -> None:
        session, life.session = life.session, ""
        if session:
            delay = life.spec.latency
            self.at(now + delay, lambda t: self.syncer_up and self.core.disconnected(session, t))

    def kill_syncer(self, back_after: float) -> None:
        """SIGKILL: back from its last checkpoint in a new epoch."""
        self.syncer_up = False
        for life in self.lives:
            if life.alive and not life.ended and life.session:
                life.session = ""
                life.link.disconnected(self.now)
                self.at(self.now + back_after, lambda t, life=life: life.connect(t))
        self.at(self.now + back_after, lambda t: self.restart_syncer())

    def restart_syncer(self) -> None:
        self.epoch += 1
        saved = self.saved
        self.core = SyncerCore(
            self.config, run_id="r", epoch=self.epoch, restored=saved["state"] if saved else None
        )
        self.origin = self.now
        if saved:
            self.theta = [t.clone() for t in saved["theta"]]
            self.buffer = [t.clone() for t in saved["buffer"]]
            self.intervals = {k: list(v) for k, v in saved["intervals"].items()}
        else:
            self.theta, self.buffer, self.intervals = [], [], {}
        self.syncer_up = True

    # ------------------------------------------------------------------ network

    def to_syncer(self, life: Life, message: msg.Message, payload, now: float) -> None:
        if not life.session or now < life.cut_until:
            return
        session, spec = life.session, life.spec
        arrive = now + spec.latency + (spec.transfer if payload is not None else 0.0)
        if payload is None and self.random.random() < spec.loss:
            return
        msg.decode_from_learner(msg.encode(message))  # what is sent must be sendable
        for _ in range(2 if self.random.random() < spec.repeat else 1):
            self.at(arrive, lambda t: self.at_syncer(life, session, message, payload, t))
            arrive += self.random.random() * spec.latency

    def at_syncer(self, life: Life, session: str, message, payload, now: float) -> None:
        if self.syncer_up and self.session_of.get(session) is life and now >= life.cut_until:
            self.core.receive(session, message, now, payload)

    def to_learner(self, session: str, message: msg.Message, payload, now: float) -> None:
        life = self.session_of.get(session)
        if life is None or now < life.cut_until:
            return
        if isinstance(message, msg.Pull) and self.drop_pulls > 0:
            self.drop_pulls -= 1
            return
        spec = life.spec
        if payload is None:
            if self.random.random() < spec.loss:
                return
            arrive = now + spec.latency
        else:
            begin = max(now, self.down_busy.get(life.name, 0.0))
            self.down_busy[life.name] = begin + spec.transfer
            arrive = begin + spec.transfer + spec.latency
        msg.decode_from_syncer(msg.encode(message))
        for _ in range(2 if self.random.random() < spec.repeat else 1):
            self.at(arrive, lambda t: life.receive(session, message, payload, t))
            arrive += self.random.random() * spec.latency

    # ------------------------------------------------------------------ the syncer's driver

    def carry_out(self) -> None:
        if not self.syncer_up:
            self.core.take()
            return
        while actions := self.core.take():
            for action in actions:
                self.one(action)
        deadline = self.core.next_deadline(self.now)
        if deadline is not None and deadline not in self.ticks:
            self.ticks.add(deadline)
            self.at(deadline, self.tick, TICK)

    def tick(self, now: float) -> None:
        self.ticks.discard(now)
        if self.syncer_up:
            self.core.tick(now)

    def one(self, action: act.Action) -> None:
        now = self.now
        if isinstance(action, act.Send):
            self.to_learner(action.session, action.message, None, now)
        elif isinstance(action, act.SendFragment):
            p = action.fragment
            info = msg.Payload(codec="none", kind="values", parts=(), num_bytes=8, digest="0")
            message = msg.Fragment(
                generation=action.generation, fragment=p, version=action.version,
                round=action.round, merged_upto=action.merged_upto, payload=info,
            )  # fmt: skip
            self.to_learner(action.session, message, {f"w{p:03d}": self.theta[p].clone()}, now)
        elif isinstance(action, act.SetInitial):
            p = action.fragment
            while len(self.theta) <= p:
                self.theta.append(torch.zeros(1, dtype=torch.float64))
                self.buffer.append(torch.zeros(1, dtype=torch.float64))
            self.theta[p] = action.payload[f"w{p:03d}"].clone()
            self.core.initialized(p, now)
        elif isinstance(action, act.Merge):
            self.merge(action)
        elif isinstance(action, act.Record):
            self.tape.append({"event": action.event, "t_s": now, **action.fields})
        elif isinstance(action, act.WriteCheckpoint):
            self.saved = {
                "state": action.state,
                "theta": [t.clone() for t in self.theta],
                "buffer": [t.clone() for t in self.buffer],
                "intervals": {k: list(v) for k, v in self.intervals.items()},
            }
            self.core.checkpointed(action.state, now)
        elif isinstance(action, act.Warn):
            self.warnings.append(action.text)
        elif isinstance(action, act.Done):
            self.done = action
        else:
            assert isinstance(action, act.CloseSession)

    def merge(self, action: act.Merge) -> None:
        p, name = action.fragment, f"w{action.fragment:03d}"
        self.merge_log.append((self.now, action))
        total = sum(held.weight for held in action.contributions)
        average = sum(held.weight * held.payload[name] for held in action.contributions) / total
        outer = self.config.algorithm.outer
        if action.reanchor:
            self.theta[p], self.buffer[p] = average, torch.zeros_like(average)
        else:
            delta = self.theta[p] - average
            momentum = outer["momentum"]
            self.buffer[p] = momentum * self.buffer[p] + delta
            self.theta[p] = self.theta[p] - outer["lr"] * (delta + momentum * self.buffer[p])
        for held in action.contributions:
            c = held.message
            row = self.intervals.setdefault((held.incarnation, p), [])
            begin = c.odometer - c.tokens
            assert all(begin >= end or c.odometer <= start for start, end, _ in row), (
                f"tokens of {held.incarnation} merged twice: ({begin}, {c.odometer}] in {row}"
            )
            row.append((begin, c.odometer, action.round))
        self.core.merged(action, act.MergeResult("d", None, 0.0), self.now)

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """After every event: the ledger's identity, versions, bounded state."""
        run = self.core.run
        for account in run.accounts.values():
            for p in range(account.fragments):
                row = account.figures(p)
                assert row["processed"] == row["merged"] + row["lost"] + row["pending"], row
                assert min(row.values()) >= 0, row
                merged = sum(e - s for s, e, _ in self.intervals.get((account.incarnation, p), []))
                assert merged == row["merged"], (account.incarnation, p, merged, row)
        assert len(run.book.open) <= max(1, len(run.versions))
        assert all(len(v) <= len(self.specs) for v in run.early.values())
        assert len(run.early) <= 4 * max(1, len(run.versions))

    def check_learner(self, life: Life) -> None:
        """T − c = settled, as soon as all that was said has arrived; here: never below it unless
        a snapshot was merged that the learner has not heard of."""
        if life.ledger is None or not self.syncer_up:
            return

    def finish(self) -> dict[str, list[dict[str, int]]]:
        """The final ledger, with what must hold of any finished run."""
        assert self.done is not None, (
            f"the run never ended; t = {self.now}, {self.core.status(self.now)}"
        )
        run = self.core.run
        ledgers = {name: run.ledger(name) for name in self.specs if run.ledger(name)}
        for rows in ledgers.values():
            for row in rows:
                assert row["pending"] == 0
        return ledgers

    def events(self, kind: str) -> list[dict]:
        return [event for event in self.tape if event["event"] == kind]
