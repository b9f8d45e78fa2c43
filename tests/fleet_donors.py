"""A fleet in virtual time whose learners have an inner state to lose and to donate.

The real InnerExchange, StateSource and Assembly; the state is one row of numbers, which says whose
it is and after which step it was copied.
"""

from __future__ import annotations

import torch

from dd_lightning.learner.recovery import InnerExchange
from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.transfer import Entry
from tests.fleet import Fleet
from tests.fleet_learner import BOUNDARY, Life, Toy

ROW = 400  # float64
OF_STATE = (msg.DonateState, msg.StateChunk, msg.StateComing, msg.StateOver)


class ToyState:
    """`InnerState` of a learner: ROW times (learner, step)."""

    def __init__(self, life: DonatingLife) -> None:
        self.life, self.loaded = life, None
        self.description = life.fleet.optimizers.get(life.name, "sgd")

    def entries(self):
        row = torch.tensor([float(self.life.name), float(self.life.ledger.step)])
        return {Entry(0, "w", "momentum", "float64", (2 * ROW,)): row.to(torch.float64).repeat(ROW)}

    def fits(self):
        return lambda entry: None

    def load(self, entries):
        ((_, data),) = entries.items()
        row = torch.frombuffer(data, dtype=torch.float64).reshape(ROW, 2)
        assert bool((row == row[0]).all()), "pieces of two copies"
        self.loaded = (str(int(row[0, 0])), int(row[0, 1]))


class AtOnce:
    """`StateCopies` that copy at once; `finish` as BackgroundCopy's."""

    def begin(self, tensors):
        self.copied = {name: tensor.clone() for name, tensor in tensors.items()}
        return self

    def finish(self):
        return self.copied


class DonatingLife(Life):
    """Waits for a peer's state where it is promised one, donates when asked."""

    exchange = None
    donated = False
    began_s = None

    def begin(self, now: float) -> None:
        fragments = self.fleet.config.algorithm.fragments
        tensors = tuple(msg.TensorInfo(f"w{i:03d}", (1,)) for i in range(fragments))
        self.toy = Toy(fragments, 1.0 + int(self.name) % 7)
        self.state = ToyState(self)
        join = msg.Join(
            learner=self.name, incarnation=self.incarnation, number=0, tensors=tensors,
            dtype="float64", step=self.step0, wants_state=self.step0 == 0, host="h", pid=1,
            state_from="checkpoint" if self.step0 else "cold",
        )  # fmt: skip
        self.link = LearnerLink(join, now=now, address="virtual", connect_timeout_s=1e6)
        self.connect(now)

    def deliver(self, message: msg.Message, payload, now: float) -> None:
        if isinstance(message, msg.Welcome):
            self.donated = message.donated
            if self.exchange is not None:
                self.exchange.welcomed(message)
        elif isinstance(
            message, msg.DonateState | msg.StateChunk | msg.StateComing | msg.StateOver
        ):
            self.exchange.take(message, payload, now)
        super().deliver(message, payload, now)

    def boundary(self, now: float, stepped: bool) -> None:
        if self.ledger is not None and not self.training and self.alive and not self.ended:
            for out in self.ledger.boundary(now):
                if isinstance(out, msg.Applied):
                    self.saw_apply(out, now)
                self.link.say(out)
            if not self.ledger.loaded:
                self.pump(now)
                return
            if self.exchange is None:
                self._exchange(now)
            if self.exchange.waiting:
                self.exchange.tick(now)
                self.pump(now)
                if self.exchange.waiting:
                    self.fleet.at(now + 0.5, lambda t: self.boundary(t, False), BOUNDARY)
                    return
            self.began_s = now
        super().boundary(now, stepped)
        if stepped and self.alive and self.exchange is not None:
            self.exchange.boundary(self.ledger.step)
            self.pump(now)

    def step(self, now: float) -> None:
        if self.alive and self.exchange is not None:
            self.exchange.settled()
            self.pump(now)
        super().step(now)

    def _exchange(self, now: float) -> None:
        self.exchange = InnerExchange(
            self.state, AtOnce(), self.link, lambda method, argument: method(argument),
            self.fleet.config.timeouts.donor,
        )  # fmt: skip
        self.exchange.begin(self.donated, now)
        self.pump(now)

    def pump(self, now: float) -> None:
        super().pump(now)
        if self.alive and now >= self.busy_up and not self.link._uploads:
            chunk = self.link.inner.next_chunk(self.link.generation)
            if chunk is not None:
                self.fleet.chunks += 1
                self.fleet.to_syncer(self, *chunk, now)
                self.busy_up = now + self.spec.transfer
                self.fleet.at(self.busy_up, lambda t: self.pump(t) if self.alive else None)


class DonatingFleet(Fleet):
    """`optimizers`: learner to its description; "sgd" for the others."""

    life = DonatingLife

    def __init__(self, *arguments, optimizers=None, **options) -> None:
        self.optimizers, self.chunks = optimizers or {}, 0
        super().__init__(*arguments, **options)

    def origin(self, learner: str, life: int = -1) -> tuple[str, int] | None:
        """(donor, step) of what that life of the learner loaded."""
        return [x for x in self.lives if x.name == learner][life].state.loaded
