"""A fleet in virtual time: the real SyncerCore, LearnerLinks and LearnerLedgers, a toy model
(`tests/fleet_learner.py`), and a network that delays, loses, repeats and cuts. No sockets, no
clock, no threads. An oracle remembers every token interval that was merged, so that nothing counts
twice, and every rule that must hold at every event is checked after every event.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dd_lightning.protocol import actions as act
from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.syncer_core import SyncerCore
from dd_lightning.protocol.verdicts import KEPT_VERSIONS
from dd_lightning.syncer.merger import UNKNOWN_BASE
from tests.fleet_checks import check_core, check_learner
from tests.fleet_cuts import FleetCuts
from tests.fleet_learner import TICK, Life, Spec


@dataclass
class MessageFault:
    """The next `left` messages of that kind are lost, come twice, or come later than all others."""

    kind: str  # name of the message's class
    what: str  # lose | repeat | delay
    left: int = 1
    seconds: float = 0.0
    every: int = 1  # only each so many-th of them
    seen: int = 0

    def strike(self) -> list[float]:
        """How much later than due each copy arrives."""
        self.seen += 1
        if self.seen % self.every:
            return [0.0]
        self.left -= 1
        return {"lose": [], "repeat": [0.0, self.seconds], "delay": [self.seconds]}[self.what]


class Fleet:
    """Syncer, learners and what lies between; `run()` plays it to the end."""

    life = Life

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
        self.saves: list[dict] = []  # checkpoints that are on disk
        self.merge_s = self.checkpoint_s = 0.0  # what the syncer takes for them
        self.deltas = False  # contributions travel as deltas where they may
        self.history: list[dict[msg.Version, torch.Tensor]] = []  # Θ_p by version
        self.message_faults: list[MessageFault] = []
        self.disturbed_s = 0.0  # when the last fault struck or ended
        self.quorum_since_s: float | None = None  # enough learners train
        self.num_events = 0
        self.checked: dict[object, object] = {}  # what was checked last, see `fleet_checks`
        self.counts: Counter[str] = Counter()  # of messages sent, by kind
        self.newest: list[msg.Version] = []  # of every fragment, over all epochs
        self.ticks: set[float] = set()
        self.drop_pulls = 0  # the next so many pulls are lost
        self.hooks: list[Callable[[Fleet], None]] = []
        self.merge_log: list[tuple[float, act.Merge]] = []
        self.down_busy: dict[str, float] = {}
        self.cuts = FleetCuts(self)
        self.core = SyncerCore(self.config, run_id="r", epoch=1)
        for name, spec in self.specs.items():
            self.at(spec.start, lambda t, name=name: self.start(name, t))

    # ------------------------------------------------------------------ time

    def at(self, time: float, what: Callable[[float], object], order: int = 0) -> None:
        heapq.heappush(self.heap, (time, order, next(self.serial), what))

    def run(self, until: float = 1e5) -> Fleet:
        self.carry_out()
        while self.heap and self.done is None and self.heap[0][0] <= until:
            time, _, _, what = heapq.heappop(self.heap)
            self.now = max(self.now, time)
            self.num_events += 1
            assert self.num_events < 200_000, f"an event storm at t = {self.now}"
            what(self.now)
            self.carry_out()
            self.check()
            for hook in list(self.hooks):
                hook(self)
        return self

    def advance(self, seconds: float) -> None:
        """Play so long, and no longer."""
        until = self.now + seconds
        self.run(until)
        self.now = until if self.done is None else self.now

    def start(self, name: str, now: float, step0: int = 0, **options) -> Life:
        """A new process of that learner; `options`: part (of a cut), takeover, may_fail."""
        life = self.life(
            self, name, self.specs[name], f"{name}-{next(self.serial)}", step0, **options
        )
        self.lives.append(life)
        self.current[name] = life
        life.begin(now)
        return life

    # ------------------------------------------------------------------ faults

    def kill(self, name: str, back_after: float | None = None, from_step: int = 0) -> None:
        self.current[name].kill(self.now)
        restores = self.cuts.restores

        def again(now: float) -> None:
            if self.cuts.restores == restores:  # else its id is held by who came from the cut
                self.start(name, now, from_step)

        if back_after is not None:
            self.at(self.now + back_after, again)

    def cut(self, name: str, seconds: float, silent: bool = False) -> None:
        """The link is dead for so long; `silent`: neither side sees the connection close."""
        self.cut_life(self.current[name], seconds, silent)

    def cut_life(self, life: Life, seconds: float, silent: bool = False) -> None:
        """As `cut`, of one process."""
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

    def kill_syncer(self, back_after: float, older: int = 0) -> None:
        """SIGKILL: back from its last checkpoint in a new epoch; or, the last `older` being torn,
        from the one before them."""
        self.syncer_up = False
        for life in self.lives:
            if life.alive and not life.ended and life.session:
                life.session = ""
                life.link.disconnected(self.now)
                self.at(self.now + back_after, lambda t, life=life: life.connect(t))
        self.at(self.now + back_after, lambda t: self.restart_syncer(older))

    def restart_syncer(self, older: int = 0) -> None:
        self.epoch += 1
        self.disturbed_s = self.now
        del self.saves[max(1, len(self.saves) - older) :]
        saved = self.saved
        self.core = SyncerCore(
            self.config,
            run_id="r",
            epoch=self.epoch,
            restored=saved["state"] if saved else None,
            resumed=True,
        )
        if saved:
            self.load(saved)
        else:
            self.theta, self.buffer, self.intervals, self.history = [], [], {}, []
        self.checked.clear()
        self.syncer_up = True

    def load(self, saved: dict) -> None:
        """What the new core's checkpoint holds beside its state."""
        self.theta = [t.clone() for t in saved["theta"]]
        self.buffer = [t.clone() for t in saved["buffer"]]
        versions = self.core.run.versions
        self.history = [{v: t} for v, t in zip(versions, self.theta, strict=True)]
        self.intervals = {k: list(v) for k, v in saved["intervals"].items()}

    # ------------------------------------------------------------------ network

    def to_syncer(self, life: Life, message: msg.Message, payload, now: float) -> None:
        self.counts[type(message).__name__] += 1
        if not life.session or now < life.cut_until:
            return
        session, spec = life.session, life.spec
        arrive = now + spec.latency + (spec.transfer if payload is not None else 0.0)
        msg.decode_from_learner(msg.encode(message))  # what is sent must be sendable
        for later in self.fate(message, payload, spec):
            self.at(arrive + later, lambda t: self.at_syncer(life, session, message, payload, t))

    def fate(self, message: msg.Message, payload, spec: Spec) -> list[float]:
        """How much later than due each copy arrives; empty: it is lost."""
        for fault in self.message_faults:
            if fault.kind == type(message).__name__:
                delays = fault.strike()
                if not fault.left:
                    self.message_faults.remove(fault)
                self.disturbed_s = self.now + max(delays, default=0.0)
                return delays
        if payload is None and self.random.random() < spec.loss:
            return []
        delays, later = [], 0.0
        for _ in range(2 if self.random.random() < spec.repeat else 1):
            delays.append(later)
            later += self.random.random() * spec.latency
        return delays

    def at_syncer(self, life: Life, session: str, message, payload, now: float) -> None:
        if self.syncer_up and self.session_of.get(session) is life and now >= life.cut_until:
            self.core.receive(session, message, now, payload)

    def to_learner(self, session: str, message: msg.Message, payload, now: float) -> None:
        self.counts[type(message).__name__] += 1
        life = self.session_of.get(session)
        if life is None or now < life.cut_until:
            return
        if isinstance(message, msg.Pull) and self.drop_pulls > 0:
            self.drop_pulls -= 1
            return
        spec = life.spec
        if payload is None:
            arrive = now + spec.latency
        else:
            transfer = spec.transfer if spec.down is None else spec.down
            begin = max(now, self.down_busy.get(life.name, 0.0))
            self.down_busy[life.name] = begin + transfer
            arrive = begin + transfer + spec.latency
        msg.decode_from_syncer(msg.encode(message))
        for later in self.fate(message, payload, spec):
            self.at(arrive + later, lambda t: life.receive(session, message, payload, t))

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
        elif isinstance(action, act.RelayState):
            self.to_learner(action.session, action.message, action.payload, now)
        elif isinstance(action, act.SetInitial):
            p = action.fragment
            while len(self.theta) <= p:
                self.theta.append(torch.zeros(1, dtype=torch.float64))
                self.buffer.append(torch.zeros(1, dtype=torch.float64))
                self.history.append({})
            self.theta[p] = action.payload[f"w{p:03d}"].clone()
            self.history[p] = {self.core.run.versions[p]: self.theta[p]}
            self.core.initialized(p, now)
        elif isinstance(action, act.Merge):
            self.job(self.merge_s, lambda: self.merge(action))
        elif isinstance(action, act.Record):
            self.tape.append({"event": action.event, "t_s": now, **action.fields})
        elif isinstance(action, act.WriteCheckpoint) and "cut" in action.state:
            self.cuts.write(action.state, now)
        elif isinstance(action, act.CutDone | act.CutFailed):
            self.cuts.ended(action)
        elif isinstance(action, act.WriteCheckpoint):
            saved = {
                "state": action.state,
                "theta": [t.clone() for t in self.theta],
                "buffer": [t.clone() for t in self.buffer],
                "intervals": {k: list(v) for k, v in self.intervals.items()},
            }
            self.job(self.checkpoint_s, lambda: self.write(saved))
        elif isinstance(action, act.Warn):
            self.warnings.append(action.text)
        elif isinstance(action, act.Done):
            self.done = action
        else:
            assert isinstance(action, act.CloseSession)

    def job(self, seconds: float, what: Callable[[], None]) -> None:
        """A job of the syncer's training thread; it dies with the syncer."""
        core = self.core
        if seconds:
            do = lambda t: what() if self.syncer_up and core is self.core else None  # noqa: E731
            self.at(self.now + seconds, do)
        else:
            what()

    @property
    def saved(self) -> dict | None:
        """The last checkpoint."""
        return self.saves[-1] if self.saves else None

    def write(self, saved: dict) -> None:
        self.saves = [*self.saves[-2:], saved]
        self.core.checkpointed(saved["state"], self.now)

    def merge(self, action: act.Merge) -> None:
        self.merge_log.append((self.now, action))
        used = [held for held in action.contributions if self.decoded(held) is not None]
        gone = {held.learner for held in action.contributions} - {held.learner for held in used}
        rejected = tuple((learner, UNKNOWN_BASE) for learner in sorted(gone))
        if used:
            self.move(action, used)
        self.core.merged(action, act.MergeResult("d", None, 0.0, rejected=rejected), self.now)

    def move(self, action: act.Merge, used: list[act.HeldContribution]) -> None:
        p, total = action.fragment, sum(held.weight for held in used)
        average = sum(held.weight * self.decoded(held) for held in used) / total
        outer = self.config.algorithm.outer
        if action.reanchor:
            self.theta[p], self.buffer[p] = average, torch.zeros_like(average)
        else:
            delta = self.theta[p] - average
            momentum = outer["momentum"]
            self.buffer[p] = momentum * self.buffer[p] + delta
            self.theta[p] = self.theta[p] - outer["lr"] * (delta + momentum * self.buffer[p])
        self.history[p][action.version] = self.theta[p]
        while len(self.history[p]) > KEPT_VERSIONS:
            del self.history[p][min(self.history[p])]
        for held in used:
            c = held.message
            row = self.intervals.setdefault((held.incarnation, p), [])
            begin = c.odometer - c.tokens
            assert all(begin >= end or c.odometer <= start for start, end, _ in row), (
                f"tokens of {held.incarnation} merged twice: ({begin}, {c.odometer}] in {row}"
            )
            row.append((begin, c.odometer, action.round))

    def decoded(self, held: act.HeldContribution) -> torch.Tensor | None:
        """What the learner held, from its delta where it sent one; None: of a base long gone."""
        p = held.message.fragment
        sent = held.payload[f"w{p:03d}"]
        if held.message.payload.kind == "values":
            return sent
        base = self.history[p].get(held.message.base)
        return None if base is None else base - sent

    # ------------------------------------------------------------------ what is asserted

    def check(self) -> None:
        """After every event."""
        if self.syncer_up:
            self.cuts.carry_over()
            check_core(self)
            for life in self.lives:
                if life.alive and not life.ended:
                    check_learner(self, life)

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
