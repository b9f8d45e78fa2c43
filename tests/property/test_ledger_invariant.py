"""The ledger's invariant against the syncer's accounts, under loss, repetition and reordering."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dd_lightning.protocol.accounts import Account
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.ledger import LearnerLedger
from dd_lightning.protocol.messages import HELD, Applied, Fragment, Payload, Pull

pytestmark = pytest.mark.property
EMPTY = Payload(codec="none", kind="values", parts=(), num_bytes=0, digest="")


class Scalar:
    """θ counts the learner's own work, so that it can be read back from the values."""

    def __init__(self):
        self.theta = torch.zeros(1, dtype=torch.float64)

    def read(self, fragment):
        return {"p": self.theta.clone()}

    def write(self, fragment, tensors):
        self.theta.copy_(tensors["p"])

    def dtype(self, name):
        return torch.float64


class Fleet:
    """One learner, one fragment, and as much of a syncer as decides merges and books them."""

    def __init__(self, mode, alpha):
        self.values = Scalar()
        self.ledger = LearnerLedger(self.values, 1, 4, apply=mode, mix_alpha=alpha, epoch=1)
        self.account = Account("0", "a", 1)
        self.version, self.round, self.open = (1, 0), 0, False
        self.contribution = None
        self.theta, self.pulls, self.fragments = 0.0, [], []
        self.merged_upto = None
        self.losses = 0
        self.publish((1, 0))
        self.deliver(0)
        self.boundary()

    def publish(self, round_):
        self.fragments.append((self.version, round_, self.merged_upto, self.theta))

    def deliver(self, which):
        if self.fragments:
            version, round_, upto, theta = self.fragments[which % len(self.fragments)]
            message = Fragment(
                generation=1,
                fragment=0,
                version=version,
                round=round_,
                merged_upto=upto,
                payload=EMPTY,
            )
            self.ledger.on_fragment(message, {"p": torch.tensor([theta], dtype=torch.float64)})

    def step(self, tokens):
        self.values.theta += tokens  # one unit of θ per token
        self.ledger.stepped(tokens)

    def ask(self, held):
        if not self.open:
            self.round, self.open, self.contribution = self.round + 1, True, None
            base = HELD if held else self.version
            self.pulls.append((self.round, base, self.merged_upto))

    def deliver_pull(self, which):
        if self.pulls:
            number, base, upto = self.pulls[which % len(self.pulls)]
            self.ledger.on_pull(
                Pull(generation=1, epoch=1, round=number, fragment=0, base=base, merged_upto=upto),
                0.0,
            )

    def boundary(self):
        for action in self.ledger.boundary(0.0):
            if isinstance(action, Snapshot):
                if self.open and action.round == (1, self.round):
                    self.contribution = action
            elif isinstance(action, Applied):
                self.account.advance(0, action.odometer - action.tokens, "", lambda *_: None)
        self.account.saw(self.ledger.odometer)
        self.check()

    def merge(self, with_it):
        if not self.open:
            return
        self.open = False
        if with_it and self.contribution is not None:
            s = self.contribution
            assert not self.account.overlaps(0, s.odometer, s.tokens)
            self.account.merge(0, (1, self.round), s.odometer, s.tokens, lambda *_: None)
            self.merged_upto = (1, self.round)
        self.version = (1, self.version[1] + 1)
        self.theta += 1000.0
        self.publish((1, self.round))

    def check(self):
        account, (pending,) = self.account, self.ledger.held().pending
        figures = account.figures(0)
        assert sum(figures[k] for k in ("merged", "lost", "pending")) == figures["processed"]
        unheard = self.ledger._fragments[0].snapshot
        if unheard is None or self.merged_upto != unheard.round:
            assert self.ledger.odometer - pending[1] == account.settled(0)
        assert (pending[0] == 0) == (pending[1] == 0)


TOKENS = st.integers(1, 9)
WHICH = st.integers(-3, 3)
EVENTS = st.one_of(
    st.tuples(st.just("step"), TOKENS),
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("deliver_pull"), WHICH),
    st.tuples(st.just("boundary")),
    st.tuples(st.just("merge"), st.booleans()),
    st.tuples(st.just("deliver"), WHICH),
)


@pytest.mark.parametrize(
    ("mode", "alpha"), [("overwrite", 0.0), ("rebase", 0.0), ("mix", 0.3), ("mix", 1.0)]
)
@settings(max_examples=150, deadline=None)
@given(events=st.lists(EVENTS, max_size=60))
def test_odometer_minus_c_is_what_the_syncer_has_settled(mode, alpha, events):
    fleet = Fleet(mode, alpha)
    for name, *arguments in events:
        getattr(fleet, name)(*arguments)
        if name == "step":
            fleet.boundary()


@settings(max_examples=150, deadline=None)
@given(events=st.lists(EVENTS, max_size=60))
def test_rebase_never_loses_a_token_nor_its_work(events):
    fleet = Fleet("rebase", 0.0)
    for name, *arguments in events:
        getattr(fleet, name)(*arguments)
        fleet.boundary()
    assert fleet.account.lost == [0]
    fleet.ask(False)
    fleet.merge(False)
    fleet.deliver(-1)
    fleet.boundary()
    (pending,) = fleet.ledger.held().pending
    # what was merged stands in Θ (which this model leaves out), the rest is on top of it
    assert fleet.values.theta.item() == fleet.theta + pending[1]
    assert fleet.ledger.odometer == fleet.account.merged[0] + pending[1]
