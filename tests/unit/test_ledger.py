"""The learner's ledger: boundaries, pulls, apply modes, finals, epochs, own schedule."""

import pytest
import torch

from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.ledger import LearnerLedger
from dd_lightning.protocol.messages import (
    HELD,
    Applied,
    Fragment,
    Nothing,
    Payload,
    Pull,
    Welcome,
)

pytestmark = pytest.mark.unit
EMPTY = Payload(codec="none", kind="values", parts=(), num_bytes=0, digest="")


class Scalars:
    """One scalar parameter `p<i>` per fragment, and the buffer `p<i>.var`."""

    def __init__(self, num_fragments, dtype=torch.float32):
        self.tensors = [
            {f"p{i}": torch.zeros(1, dtype=dtype), f"p{i}.var": torch.ones(1, dtype=dtype)}
            for i in range(num_fragments)
        ]

    def read(self, fragment):
        return {name: tensor.clone() for name, tensor in self.tensors[fragment].items()}

    def write(self, fragment, tensors):
        for name, tensor in tensors.items():
            self.tensors[fragment][name].copy_(tensor)

    def dtype(self, name):
        return self.tensors[0]["p0"].dtype

    def move(self, by):
        for i, tensors in enumerate(self.tensors):
            tensors[f"p{i}"] += by


def fragment(p=0, version=(1, 0), round_=(1, 0), value=0.0, merged_upto=None):
    tensors = {f"p{p}": torch.tensor([value]), f"p{p}.var": torch.tensor([value + 1])}
    message = Fragment(
        generation=1,
        fragment=p,
        version=version,
        round=round_,
        merged_upto=merged_upto,
        payload=EMPTY,
    )
    return message, tensors


def pull(round_=1, p=0, base=(1, 0), epoch=1, **options):
    options = {"merged_upto": None, **options}
    return Pull(generation=1, epoch=epoch, round=round_, fragment=p, base=base, **options)


def welcome(num_fragments, clock=0, next_round=1, epoch=1, offset=0, merged_upto=None):
    return Welcome(
        learner="0",
        number=1,
        generation=1,
        epoch=epoch,
        run_id="r",
        config=SyncerConfig().to_dict(),
        fragments=tuple((f"p{i}",) for i in range(num_fragments)),
        averaged=(),
        fingerprint="f",
        send_initial=False,
        clock=clock,
        offset=offset,
        next_round=next_round,
        merged_upto=merged_upto or (None,) * num_fragments,
        data_slot=0,
        num_data_slots=1,
        start_step=0,
        peer_address="",
    )


def make(num_fragments=1, sync_every=4, dtype=torch.float32, loaded=True, **options):
    values = Scalars(num_fragments, dtype)
    ledger = LearnerLedger(values, num_fragments, sync_every, **options)
    ledger.attach(welcome(num_fragments))
    if loaded:
        for p in range(num_fragments):
            ledger.on_fragment(*fragment(p))
        assert [type(a) for a in ledger.boundary(0.0)] == [Applied] * num_fragments
    return ledger, values


def step(ledger, values, tokens=10, by=1.0):
    values.move(by)
    ledger.stepped(tokens)


def only(actions, kind):
    assert [type(action) for action in actions] == [kind]
    return actions[0]


def test_pull_is_answered_at_the_boundary_with_counters_and_a_copy():
    ledger, values = make()
    ledger.on_pull(pull(), now=1.0)
    assert ledger.boundary(1.0) == []  # no step yet
    step(ledger, values, 7)
    step(ledger, values, 5)
    snapshot = only(ledger.boundary(3.5), Snapshot)
    step(ledger, values)
    assert (snapshot.step, snapshot.steps, snapshot.tokens, snapshot.odometer) == (2, 2, 12, 12)
    assert snapshot.base == (1, 0) and snapshot.round == (1, 1)
    assert snapshot.boundary_wait_s == 2.5
    assert snapshot.values["p0"].item() == 2.0  # not what came after
    assert ledger.boundary(4.0) == []


def test_pull_waits_for_its_base_and_is_dropped_when_something_newer_was_applied():
    ledger, values = make()
    step(ledger, values)
    ledger.on_pull(pull(2, base=(1, 1)), 0.0)
    assert ledger.boundary(0.0) == []
    ledger.on_fragment(*fragment(version=(1, 1), round_=(1, 1)))
    only(ledger.boundary(0.0), Applied)
    step(ledger, values)
    assert only(ledger.boundary(0.0), Snapshot).base == (1, 1)
    ledger.on_pull(pull(3, base=(1, 2)), 0.0)
    ledger.on_fragment(*fragment(version=(1, 3), round_=(1, 3)))
    assert only(ledger.boundary(0.0), Applied).version == (1, 3)
    step(ledger, values)
    assert ledger.boundary(0.0) == []


def test_a_pull_sent_again_gets_the_same_snapshot():
    ledger, values = make(deltas=True)
    step(ledger, values)
    ledger.on_pull(pull(), 0.0)
    first = only(ledger.boundary(0.0), Snapshot)
    assert first.anchor["p0"].item() == 0.0
    step(ledger, values)
    ledger.on_pull(pull(values=True), 0.0)
    again = only(ledger.boundary(0.0), Snapshot)
    assert again.values is first.values and again.odometer == first.odometer == 10
    assert again.anchor is None  # asked for values this time
    assert ledger.boundary(0.0) == []


def test_newest_fragment_only_and_limits_of_a_boundary():
    ledger, values = make(num_fragments=4, sync_every=4)
    step(ledger, values)
    for p in range(4):
        ledger.on_fragment(*fragment(p, (1, 1), (1, 1 + p), 5.0))
        ledger.on_fragment(*fragment(p, (1, 2), (1, 5 + p), 6.0))
        ledger.on_pull(pull(9 + p, p, base=(1, 2)), 0.0)
    actions = ledger.boundary(0.0)
    assert [(a.fragment, a.version) for a in actions] == [(0, (1, 2)), (1, (1, 2))]
    step(ledger, values)
    kinds = [(type(a), a.fragment) for a in ledger.boundary(0.0)]
    # oldest round first
    assert kinds == [(Applied, 2), (Applied, 3), (Snapshot, 0), (Snapshot, 1)]
    for p in (0, 1):
        ledger.on_pull(pull(13 + p, p, base=(1, 2)), 0.0)
    step(ledger, values)
    paused = ledger.boundary(0.0, unlimited=True)
    assert [(type(a), a.fragment) for a in paused] == [(Snapshot, p) for p in (2, 3, 0, 1)]


def test_not_newer_fragment_is_ignored_but_settles():
    ledger, values = make()
    step(ledger, values)
    ledger.on_pull(pull(), 0.0)
    ledger.boundary(0.0)
    step(ledger, values, 3)
    ledger.on_fragment(*fragment(version=(1, 0), merged_upto=(1, 1), value=9.0))
    assert ledger.boundary(0.0) == []
    assert ledger.held().pending == ((1, 3),)
    assert values.tensors[0]["p0"].item() == 2.0


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize(
    ("mode", "value", "steps", "tokens"),
    [
        ("overwrite", {True: 10.0, False: 10.0}, {True: 0, False: 0}, {True: 0, False: 0}),
        # Θ + (θ − s.θ) = 10 + (3 − 1), or Θ + (θ − base) = 10 + (3 − 0)
        ("rebase", {True: 12.0, False: 13.0}, {True: 2, False: 3}, {True: 13, False: 23}),
        # ½·3 + ½·10; ½·13 = 6 whole tokens, or ½·23 = 11
        ("mix", {True: 6.5, False: 6.5}, {True: 1, False: 2}, {True: 6, False: 11}),
    ],
)
def test_apply_modes_and_their_counters(mode, value, steps, tokens, merged):
    ledger, values = make(apply=mode, mix_alpha=0.5)
    step(ledger, values, 10)
    ledger.on_pull(pull(), 0.0)
    only(ledger.boundary(0.0), Snapshot)
    step(ledger, values, 6)
    step(ledger, values, 7)
    upto = (1, 1) if merged else None
    ledger.on_fragment(*fragment(version=(1, 1), round_=(1, 1), value=10.0, merged_upto=upto))
    applied = only(ledger.boundary(0.0), Applied)
    assert values.tensors[0]["p0"].item() == value[merged]
    assert (applied.steps, applied.tokens) == (steps[merged], tokens[merged])
    assert applied.odometer == 23
    assert applied.tokens_before == (13 if merged else 23)
    assert applied.settled == ((1, 1) if merged else None)
    if mode == "rebase":
        assert values.tensors[0]["p0.var"].item() == 11.0  # a buffer is taken as it is


def test_rebase_takes_buffers_as_they_arrive():
    ledger, values = make(apply="rebase", buffers=frozenset({"p0.var"}))
    values.tensors[0]["p0.var"] += 3
    step(ledger, values)
    ledger.on_fragment(*fragment(version=(1, 1), round_=(1, 1), value=10.0))
    ledger.boundary(0.0)
    assert values.tensors[0]["p0.var"].item() == 11.0


def test_sixteen_bit_learners_keep_the_cast_base():
    ledger, values = make(dtype=torch.bfloat16, apply="rebase", deltas=True)
    ledger.on_fragment(*fragment(version=(1, 1), round_=(1, 1), value=1.001))
    ledger.boundary(0.0)
    before = values.tensors[0]["p0"].clone()
    step(ledger, values, by=0.0)
    ledger.on_pull(pull(2, base=(1, 1)), 0.0)
    snapshot = only(ledger.boundary(0.0), Snapshot)
    assert torch.equal(snapshot.anchor["p0"], snapshot.values["p0"])  # no training, no delta
    ledger.on_fragment(*fragment(version=(1, 2), round_=(1, 2), value=1.001))
    ledger.boundary(0.0)
    assert torch.equal(values.tensors[0]["p0"], before)


def test_finals_are_answered_and_nothing_overwrites_them_before_they_are_settled():
    ledger, values = make(num_fragments=2)
    step(ledger, values)
    ledger.finish()
    ledger.on_pull(pull(1, 0, final=True), 0.0)
    snapshot = only(ledger.boundary(0.0), Snapshot)
    assert snapshot.final
    ledger.on_fragment(*fragment(0, (1, 1), (1, 1), 4.0))
    ledger.on_fragment(*fragment(1, (1, 1), (1, 2), 4.0))
    assert only(ledger.boundary(0.0), Applied).fragment == 1
    assert values.tensors[0]["p0"].item() == 1.0
    ledger.on_pull(pull(3, 0, base=(1, 1), final=True, merged_upto=(1, 1)), 0.0)
    answer = ledger.boundary(0.0)
    assert [type(a) for a in answer] == [Nothing]
    assert (answer[0].round, answer[0].odometer) == (3, 10)
    ledger.on_pull(pull(2, 1, base=(1, 1), final=True), 0.0)  # its round has merged already
    assert [type(a) for a in ledger.boundary(0.0)] == [Applied]  # fragment 0, settled now
    assert values.tensors[0]["p0"].item() == 1.0  # the module stays as the training left it
    ledger.on_pull(pull(4, 1, base=(1, 1), final=True), 0.0)
    assert only(ledger.boundary(0.0), Nothing).fragment == 1


def test_a_final_whose_round_is_merged_already_is_dropped():
    ledger, values = make()
    step(ledger, values)
    ledger.finish()
    ledger.on_pull(pull(1, final=True, merged_upto=(1, 1)), 0.0)
    assert ledger.boundary(0.0) == []


def test_a_higher_epoch_voids_pulls_and_arrived_fragments_and_a_lower_one_is_refused():
    ledger, values = make()
    step(ledger, values)
    ledger.on_pull(pull(1, base=(1, 1)), 0.0)
    ledger.on_fragment(*fragment(version=(1, 1), round_=(1, 1), value=5.0))
    ledger.attach(welcome(1, epoch=2))
    ledger.on_fragment(*fragment(version=(1, 2), round_=(1, 2), value=5.0))
    ledger.on_pull(pull(2), 0.0)
    assert ledger.boundary(0.0) == []
    ledger.on_pull(pull(7, base=HELD, epoch=2), 0.0)
    snapshot = only(ledger.boundary(0.0), Snapshot)
    assert snapshot.base == (1, 0) and snapshot.round == (2, 7)


def test_deltas_are_not_sent_across_epochs():
    ledger, values = make(deltas=True)
    ledger.attach(welcome(1, epoch=2))
    step(ledger, values)
    ledger.on_pull(pull(7, base=HELD, epoch=2), 0.0)
    assert only(ledger.boundary(0.0), Snapshot).anchor is None


def test_reattach_settles_what_was_merged_meanwhile():
    ledger, values = make()
    step(ledger, values)
    ledger.on_pull(pull(), 0.0)
    ledger.boundary(0.0)
    step(ledger, values, 4)
    ledger.attach(welcome(1, merged_upto=((1, 1),)))
    assert ledger.held().pending == ((1, 4),)
    ledger.on_pull(pull(1, base=HELD), 0.0)  # sent before the merge was known
    assert ledger.boundary(0.0) == []


def test_reload_overwrites_in_any_mode():
    ledger, values = make(apply="rebase")
    step(ledger, values, by=float("nan"))
    ledger.reload()
    ledger.on_fragment(*fragment(version=(1, 0), value=2.0))
    applied = only(ledger.boundary(0.0), Applied)
    assert values.tensors[0]["p0"].item() == 2.0 and applied.tokens == 0


def test_a_reload_is_taken_whole_and_hands_nothing_in_before():
    """Fragment 0 alone would be ruined by the next step's gradients, through fragment 1."""
    ledger, values = make(num_fragments=2)
    step(ledger, values, by=float("nan"))
    ledger.reload()
    ledger.on_fragment(*fragment(0, (1, 0), value=2.0))
    ledger.on_pull(pull(1, 0), 0.0)
    assert ledger.boundary(0.0) == [] and ledger.reloading
    step(ledger, values, by=float("nan"))
    ledger.on_fragment(*fragment(1, (1, 0), value=3.0))
    applied = ledger.boundary(0.0)
    assert [one.fragment for one in applied] == [0, 1] and not ledger.reloading
    assert [values.tensors[p][f"p{p}"].item() for p in (0, 1)] == [2.0, 3.0]
    step(ledger, values)
    assert only(ledger.boundary(0.0), Snapshot).steps == 1


def test_a_reload_promised_by_a_generation_that_is_over_is_not_waited_for():
    ledger, values = make()
    step(ledger, values)
    ledger.reload()
    ledger.attach(welcome(1))
    ledger.on_pull(pull(1, base=HELD), 0.0)
    assert only(ledger.boundary(0.0), Snapshot).steps == 1


def test_overlap_snapshots_at_the_own_step_and_applies_exactly_tau_later():
    ledger, values = make(num_fragments=2, sync_every=6, wait="overlap", overlap=2)
    for _ in range(2):
        step(ledger, values)
        assert ledger.boundary(0.0) == []
    ledger.on_pull(pull(1, 0), 0.0)  # others are ahead: left for the own step
    assert ledger.boundary(0.0) == []
    step(ledger, values)
    snapshot = only(ledger.boundary(0.0), Snapshot)
    assert snapshot.unasked and snapshot.round == (1, 1) and snapshot.step == 3
    ledger.on_fragment(*fragment(0, (1, 1), (1, 1), 9.0, merged_upto=(1, 1)))
    step(ledger, values)
    assert ledger.boundary(0.0) == [] and not ledger.must_wait(0.0)
    step(ledger, values)
    applied = only(ledger.boundary(0.0), Applied)
    assert applied.step == 5 and applied.tokens_before == 20
    step(ledger, values)
    assert only(ledger.boundary(0.0), Snapshot).fragment == 1


def test_overlap_waits_for_its_round_and_gives_up_at_the_bound():
    ledger, values = make(sync_every=2, wait="overlap", overlap=0, round_timeout_s=5.0)
    step(ledger, values)
    step(ledger, values)
    only(ledger.boundary(0.0), Snapshot)
    assert ledger.must_wait(1.0) and ledger.wait_deadline == 6.0
    ledger.on_pull(pull(1), 2.0)
    only(ledger.boundary(2.0), Snapshot)  # sent again
    assert ledger.must_wait(5.9)
    assert not ledger.must_wait(6.0)
    assert not ledger.must_wait(6.1) and ledger.wait_deadline is None
    ledger.on_fragment(*fragment(version=(1, 1), round_=(1, 1), merged_upto=(1, 1)))
    only(ledger.boundary(7.0), Applied)
    step(ledger, values)
    step(ledger, values)
    only(ledger.boundary(8.0), Snapshot)
    assert ledger.must_wait(8.0)


def test_a_last_snapshot_that_was_refused_is_not_waited_for():
    ledger, values = make(sync_every=1, wait="overlap", overlap=0)
    step(ledger, values)
    assert only(ledger.boundary(0.0), Snapshot).round == (1, 1)
    ledger.finish()
    ledger.on_pull(pull(2, final=True), 0.0)
    assert not only(ledger.boundary(0.0), Snapshot).final  # the first one again, which may come
    ledger.on_refused(0, (1, 1))
    final = only(ledger.boundary(0.0), Snapshot)
    assert final.final and final.round == (1, 2)
    ledger.on_refused(0, (1, 1))  # told twice
    ledger.on_pull(pull(2, final=True), 0.0)
    assert only(ledger.boundary(0.0), Snapshot).final


def test_overlap_waits_no_longer_for_a_round_that_closed_without_it():
    ledger, values = make(sync_every=1, wait="overlap", overlap=0)
    step(ledger, values)
    only(ledger.boundary(0.0), Snapshot)
    assert ledger.must_wait(1.0)
    ledger.on_closed(0, (1, 1))  # cancelled: all of its roster were paused
    assert not ledger.must_wait(1.0)


def test_overlap_counts_from_the_clock_of_the_run():
    ledger, values = make(sync_every=4, wait="overlap")
    ledger.attach(welcome(1, clock=7, next_round=2))
    step(ledger, values)
    assert only(ledger.boundary(0.0), Snapshot).round == (1, 2)


def test_state_is_plain():
    ledger, values = make(num_fragments=2)
    step(ledger, values)
    state = ledger.state_dict()
    assert state["step"] == 1 and state["versions"] == [[1, 0], [1, 0]]
