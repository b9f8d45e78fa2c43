"""The real SyncerCore driven message by message: a model of two tensors, P = H = 2, one step each
second by request, merges carried out at once.
"""

from __future__ import annotations

from typing import Any

from dd_lightning.protocol import actions as act
from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.members import Member
from dd_lightning.protocol.syncer_core import SyncerCore

TENSORS = (msg.TensorInfo("a", (2,)), msg.TensorInfo("b", (2,)))
TOKENS = 10  # of a step


class ScriptedCore:
    """Keyword arguments are `algorithm.*`; `config` the rest."""

    def __init__(self, learners: int, config: dict[str, Any] | None = None, **algorithm) -> None:
        settings = {"fragments": 2, "sync_every": 2, "max_in_flight": 1, **algorithm}
        values = {"learners": learners, "algorithm": settings, **(config or {})}
        self.config = SyncerConfig.load(values)
        self.core = SyncerCore(self.config, run_id="r", epoch=1)
        self.now = 0.0
        self.actions: list[act.Action] = []
        self.merges: list[act.Merge] = []
        self.done: act.Done | None = None
        self.reject: dict[str, str] = {}  # what the guard refuses at the next close
        self.steps: dict[str, int] = {}
        self.payload = msg.Payload(codec="none", kind="values", parts=(), num_bytes=8, digest="0")

    # ---------------------------------------------------------------- what learners do

    def join(self, learner: str, session: str = "", **change) -> None:
        """A first join of a process `a`, unless told otherwise."""
        values = {
            "learner": learner, "incarnation": f"{learner}-a", "number": 1, "tensors": TENSORS,
            "host": f"h{learner}", "pid": 100 + int(learner), **change,
        }  # fmt: skip
        self.receive(session or learner, msg.Join(**values))

    def started(self, *learners: str) -> ScriptedCore:
        """Joined, version 0 handed in, loaded, and one step made by each."""
        for learner in learners:
            self.join(learner)
        for p in range(2):
            first = msg.Initial(generation=1, fragment=p, payload=self.payload)
            self.receive(learners[0], first, payload="v0")
        for learner in learners:
            self.step(learner)
        return self

    def step(self, learner: str, session: str = "", generation: int = 0) -> None:
        """One more inner step is reported, a second after the last event."""
        self.now += 1.0
        self.steps[learner] = self.steps.get(learner, 0) + 1
        report = msg.Progress(
            generation=generation or self.member(learner).generation,
            step=self.steps[learner],
            odometer=TOKENS * self.steps[learner],
            step_seconds=(1.0,),
        )
        self.receive(session or self.member(learner).session, report)

    def opened(self, number: int) -> ScriptedCore:
        """Everyone steps until that round is open."""
        for _ in range(20):
            if any(e["round"] == number for e in self.events("round_open")):
                return self
            for member in self.core.run.training:
                self.step(member.learner)
        raise AssertionError(f"round {number} did not open")

    def contribution(self, learner: str, number: int, generation: int = 0) -> msg.Contribution:
        """What the learner would answer to the pull of that round: all its unsettled steps."""
        run, fragment = self.core.run, (number - 1) % 2
        odometer = TOKENS * self.steps[learner]
        tokens = odometer - self.member(learner).account.settled(fragment)
        assert run.layout is not None
        return msg.Contribution(
            generation=generation or self.member(learner).generation,
            epoch=1, round=number, fragment=fragment, step=self.steps[learner],
            steps=tokens // TOKENS, tokens=tokens, odometer=odometer,
            base=run.versions[fragment], payload=self.payload, fingerprint=run.layout.fingerprint,
        )  # fmt: skip

    # ---------------------------------------------------------------- the driver

    def receive(self, session: str, message: msg.Message, payload: object = None) -> None:
        self.core.receive(session, message, self.now, payload)
        self.carry_out()

    def advance(self, seconds: float, beats: tuple[str, ...] = (), stepping: bool = False) -> None:
        """Time passes in half seconds; `beats` send heartbeats, or reports of steps."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            for learner in beats:
                member = self.member(learner)
                if not member.live:
                    continue
                if stepping and member.state not in ("finishing",):
                    self.steps[learner] = self.steps.get(learner, 0) + 1
                step = self.steps.get(learner, 0)
                beat = msg.Progress(generation=member.generation, step=step, odometer=TOKENS * step)
                self.receive(member.session, beat)
            self.core.tick(self.now)
            self.carry_out()

    def carry_out(self) -> None:
        while actions := self.core.take():
            for action in actions:
                self.actions.append(action)
                self.one(action)

    def one(self, action: act.Action) -> None:
        if isinstance(action, act.SetInitial):
            self.core.initialized(action.fragment, self.now)
        elif isinstance(action, act.Merge):
            self.merges.append(action)
            rejected, self.reject = tuple(self.reject.items()), {}
            result = act.MergeResult("d", None, 0.0, rejected=rejected)
            self.core.merged(action, result, self.now)
        elif isinstance(action, act.WriteCheckpoint):
            self.core.checkpointed(action.state, self.now)
        elif isinstance(action, act.Done):
            self.done = action

    # ---------------------------------------------------------------- what was said

    def member(self, learner: str) -> Member:
        return self.core.run.members[learner]

    def sent(self, session: str, kind: type) -> list[Any]:
        sends = [a for a in self.actions if isinstance(a, act.Send) and a.session == session]
        return [a.message for a in sends if isinstance(a.message, kind)]

    def fragments_to(self, session: str) -> list[act.SendFragment]:
        return [a for a in self.actions if isinstance(a, act.SendFragment) and a.session == session]

    def events(self, kind: str) -> list[dict]:
        return [a.fields for a in self.actions if isinstance(a, act.Record) and a.event == kind]

    @property
    def warnings(self) -> list[act.Warn]:
        return [a for a in self.actions if isinstance(a, act.Warn)]
