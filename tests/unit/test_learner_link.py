"""The learner's link: joins, fencing, heartbeats, uploads, deadlines."""

import itertools

import pytest
import torch
from msgspec.structs import replace

from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.held import Held, Snapshot
from dd_lightning.protocol.learner_link import ATTACHED, ENDED, JOINING, OFFLINE, LearnerLink
from dd_lightning.protocol.link_actions import Deliver, Fail, InitialValues, Reconnect, Send
from dd_lightning.protocol.messages import (
    Applied,
    Closed,
    Contribution,
    Finish,
    Fragment,
    Goodbye,
    Join,
    Payload,
    Pong,
    Progress,
    Pull,
    Received,
    Refused,
    Rejoin,
    Released,
    Verdict,
    Welcome,
)

pytestmark = pytest.mark.unit
EMPTY = Payload(codec="none", kind="values", parts=(), num_bytes=0, digest="")
JOIN = Join(learner="0", incarnation="a", number=0)
WELCOME = Welcome(
    learner="0",
    number=1,
    generation=5,
    epoch=2,
    run_id="r",
    config=SyncerConfig().to_dict(),
    fragments=(("a",), ("b",)),
    averaged=(),
    fingerprint="f",
    send_initial=False,
    clock=0,
    offset=0,
    next_round=1,
    merged_upto=(None, None),
    data_slot=0,
    num_data_slots=1,
    start_step=0,
    peer_address="127.0.1.3",
)
HELD = Held(3, 30, ((2, 1), (2, 1)), ((1, 10), (3, 30)))


def new_link(**options):
    return LearnerLink(JOIN, now=0.0, address="tcp://h:1", connect_timeout_s=60.0, **options)


def attached(**options):
    link = new_link(**options)
    link.connected(1.0)
    link.receive(WELCOME, None, 2.0)
    link.take()
    return link


def sent(link):
    return [a.message for a in link.take() if isinstance(a, Send)]


def fragment(p=0, version=(2, 1), round_=(2, 1), generation=5):
    return Fragment(
        generation=generation,
        fragment=p,
        version=version,
        round=round_,
        merged_upto=None,
        payload=EMPTY,
    )


def snapshot(p=0, round_=(2, 1)):
    values = {"a": torch.zeros(1)}
    return Snapshot(p, round_, 3, 3, 30, 30, (2, 0), values, None, values)


def test_a_join_is_repeated_with_its_number_until_it_is_answered():
    link = new_link()
    link.connected(1.0)
    (first,) = sent(link)
    assert isinstance(first, Join) and first.number == 1 and not first.continues
    assert link.next_deadline() == 3.0
    link.tick(2.9)
    assert sent(link) == []
    link.tick(3.0)
    assert sent(link) == [first]
    link.receive(replace(WELCOME, number=7), None, 3.1)  # the answer to another join
    assert link.phase == JOINING
    link.receive(WELCOME, None, 3.2)
    actions = link.take()
    assert actions[0] == Deliver(WELCOME)
    assert isinstance(actions[1].message, Progress) and actions[1].message.generation == 5
    assert (link.phase, link.generation, link.epoch) == (ATTACHED, 5, 2)


def test_a_rejoining_process_states_what_it_holds():
    link = attached()
    link.report(HELD, 3.0, step_seconds=0.1)
    link.disconnected(4.0)
    assert link.phase == OFFLINE
    link.connected(5.0)
    join = sent(link)[-1]
    assert (join.number, join.generation, join.continues, join.run_id) == (2, 5, True, "r")
    assert (join.step, join.odometer) == (3, 30)
    assert (join.versions, join.pending) == (HELD.versions, HELD.pending)


def test_rejoin_counts_only_for_the_current_generation_and_outside_a_join():
    link = attached()
    link.receive(Rejoin(generation=4), None, 3.0)
    assert link.take() == []
    link.receive(Rejoin(generation=5), None, 3.0)
    assert [type(m) for m in sent(link)] == [Join]
    link.receive(Rejoin(generation=5), None, 3.0)  # of what was sent before: no storm
    assert link.take() == []


def test_messages_of_other_generations_and_lower_epochs_are_dropped():
    link = attached()
    link.receive(fragment(generation=4), None, 3.0)
    link.receive(fragment(version=(1, 9)), None, 3.0)
    link.receive(
        Pull(generation=5, epoch=1, round=9, fragment=0, base="held", merged_upto=None), None, 3.0
    )
    assert link.take() == []


def test_an_older_syncer_is_left_and_another_run_is_an_error():
    link = attached()
    link.disconnected(3.0)
    link.connected(4.0)
    link.take()
    link.receive(replace(WELCOME, number=2, epoch=1), None, 5.0)
    assert isinstance(link.take()[0], Reconnect) and link.phase == OFFLINE
    link.connected(6.0)
    link.take()
    link.receive(replace(WELCOME, number=3, run_id="other"), None, 7.0)
    (fail,) = link.take()
    assert isinstance(fail, Fail) and "'other'" in fail.reason and link.phase == ENDED


@pytest.mark.parametrize("seen_at", ["127.0.1.3", "127.0.1.3:4711"])
def test_a_learner_behind_its_proxy_is_admitted(seen_at):
    link = new_link(via="127.0.1.3")
    link.connected(1.0)
    link.receive(replace(WELCOME, peer_address=seen_at), None, 2.0)
    assert link.phase == ATTACHED


def test_a_learner_past_its_proxy_fails():
    link = new_link(via="127.0.1.4")
    link.connected(1.0)
    link.take()
    link.receive(WELCOME, None, 2.0)
    (fail,) = link.take()
    assert "past its proxy" in fail.reason and "127.0.1.3" in fail.reason


def test_a_fatal_refusal_fails_and_another_is_tried_again():
    link = new_link()
    link.connected(1.0)
    link.take()
    link.receive(Refused(number=1, reason="held", fatal=False, retry_s=9.0), None, 1.5)
    assert link.take() == [] and link.last_error == "held"
    link.tick(link.next_deadline())
    assert [m.number for m in sent(link)] == [2]
    link.receive(Refused(number=1, reason="of the first join"), None, 3.4)  # repeated on its way
    assert link.phase == JOINING
    link.receive(Refused(number=2, reason="another model"), None, 3.5)
    assert "another model" in link.take()[0].reason and link.phase == ENDED


def held_until_the_lease_is_over(retry_s, **options):
    """Joins, each refused at once: their times, and the failure in the end."""
    link = new_link(**options)
    link.connected(1.0)
    now, joins = 1.0, []
    while link.phase != ENDED:
        for join in sent(link):
            assert join.number == len(joins) + 1
            joins.append(now)
            refused = Refused(
                number=join.number, reason="held by pid 7", fatal=False, retry_s=retry_s
            )
            link.receive(refused, None, now)
        if link.phase == JOINING:
            now = link.next_deadline()
            link.tick(now)
        for action in link._actions:
            if isinstance(action, Fail):
                return joins, action.reason
    raise AssertionError("it ended without a word")


def test_a_held_id_is_asked_for_until_its_lease_is_over_and_then_named():
    joins, reason = held_until_the_lease_is_over(retry_s=10.0)
    assert joins[0] == 1.0 and joins[-1] == 11.0  # the holder's lease has run out by then
    pauses = [after - before for before, after in itertools.pairwise(joins)]
    assert pauses[:3] == [0.25, 0.5, 1.0] and max(pauses) <= 2.0 and len(joins) < 12
    assert "held by pid 7" in reason


def test_a_held_id_is_waited_for_no_longer_than_the_first_connection():
    joins, reason = held_until_the_lease_is_over(retry_s=1e6)
    assert joins[-1] < 60.0 and "60 s" in reason and "held by pid 7" in reason


def test_once_admitted_the_next_refusal_is_waited_for_anew():
    link = new_link()
    link.connected(1.0)
    link.receive(Refused(number=1, reason="held", fatal=False, retry_s=9.0), None, 1.5)
    link.tick(1.75)
    link.receive(replace(WELCOME, number=2), None, 2.0)
    link.disconnected(50.0)
    link.connected(51.0)
    link.receive(Refused(number=3, reason="held", fatal=False, retry_s=9.0), None, 51.0)
    assert link.phase == JOINING


def test_fragments_are_acknowledged_at_arrival_and_close_rounds():
    link = attached()
    for round_ in ((2, 1), (2, 3)):
        link.contribute(snapshot(0, round_))
    link.contribute(snapshot(1, (2, 2)))
    link.receive(fragment(0, (2, 2), (2, 2)), "bytes", 3.0)
    actions = link.take()
    assert actions[0] == Send(Received(generation=5, fragment=0, version=(2, 2)))
    assert actions[1].payload == "bytes"
    link.receive(Closed(generation=5, fragment=1, round=(2, 2)), None, 3.0)
    link.take()
    assert link.next_upload().round == (2, 3)  # newer of fragment 0; the closed ones are gone
    assert link.next_upload() is None


def test_uploads_are_stamped_with_the_current_generation():
    link = attached()
    link.contribute(snapshot())
    upload = link.next_upload()
    message = link.stamp(upload, EMPTY)
    assert isinstance(message, Contribution)
    assert (message.generation, message.epoch, message.round) == (5, 2, 1)
    assert message.fingerprint == "f"
    link.initial(1, {"b": torch.zeros(1)})
    initial = link.next_upload()
    assert isinstance(initial, InitialValues) and link.stamp(initial, EMPTY).fragment == 1


def test_a_verdict_drops_the_queued_repeat_and_a_cut_drops_all():
    link = attached()
    link.contribute(snapshot())
    link.receive(Verdict(generation=5, epoch=2, round=1, fragment=0, reason="checksum"), None, 3.0)
    assert not link.has_uploads and "checksum" in link.last_error
    link.contribute(snapshot())
    link.take()
    link.disconnected(4.0)
    assert not link.has_uploads
    link.contribute(snapshot())  # nobody to send it to: it is pulled again
    link.say(Applied(
        generation=0, step=1, fragment=0, version=(2, 1), odometer=1, steps=0, tokens=0,
        tokens_before=1,
    ))  # fmt: skip
    assert not link.has_uploads and link.take() == []


def test_progress_is_coalesced_and_is_the_heartbeat():
    link = attached()
    link.report(HELD, 3.0, step_seconds=0.1, seconds_stepping=0.1, loss=1.0)
    (first,) = sent(link)
    link.report(HELD, 3.001, step_seconds=0.2, loss=2.0)
    link.report(HELD, 3.002, step_seconds=0.3, loss=3.0)
    assert link.take() == []
    link.tick(link.next_deadline())
    (second,) = sent(link)
    assert first.step_seconds == (0.1,) and second.step_seconds == (0.2, 0.3)
    assert second.losses == (1.0, 2.0, 3.0)
    link.report(HELD, 3.005, state="paused")
    assert [m.state for m in sent(link)] == ["paused"]  # a change of state does not wait
    assert link.next_deadline() == 5.005
    link.tick(5.005)
    (heartbeat,) = sent(link)
    assert heartbeat.step == HELD.step and heartbeat.ping > 0
    link.receive(Pong(generation=5, ping=heartbeat.ping), None, 5.255)
    link.tick(7.005)
    assert sent(link)[0].rtt_ms == pytest.approx(250.0)


def test_finish_is_said_again_after_each_join_until_released():
    link = attached()
    link.finish(HELD, "done", 3.0)
    assert [type(m) for m in sent(link)] == [Progress, Finish]
    link.disconnected(4.0)
    link.connected(5.0)
    link.receive(replace(WELCOME, number=2, generation=6), None, 6.0)
    assert sent(link)[-1] == Finish(generation=6, step=3, odometer=30, reason="done")
    link.receive(Released(generation=6), None, 7.0)
    assert link.take() == [Deliver(Released(generation=6))]
    assert link.phase == ENDED and link.next_deadline() is None


def test_goodbye_ends_it():
    link = attached()
    link.goodbye("tired")
    assert sent(link) == [Goodbye(generation=5, reason="tired")]
    link.connected(9.0)
    assert link.take() == []


def test_the_connect_deadline_names_address_attempts_and_cause():
    link = new_link()
    link.connection_failed("refused", 1.0)
    link.connection_failed("refused again", 2.0)
    assert link.next_deadline() == 60.0
    link.tick(60.0)
    (fail,) = link.take()
    for said in ("tcp://h:1", "60 s", "2 attempts", "refused again"):
        assert said in fail.reason


def test_the_deadline_moves_with_each_first_fragment_and_ends_with_the_last():
    link = attached()
    link.receive(fragment(0), None, 50.0)
    link.tick(109.0)
    assert not [a for a in link.take() if isinstance(a, Fail)]
    link.receive(fragment(1), None, 109.5)
    link.disconnected(110.0)
    link.tick(10_000.0)  # a syncer that is away later costs nothing
    assert not [a for a in link.take() if isinstance(a, Fail)]


def test_silence_makes_it_reconnect():
    link = new_link()
    link.connected(1.0)
    link.take()
    link.tick(1.0 + SyncerConfig().timeouts.lease)
    assert isinstance(link.take()[0], Reconnect)
    link = attached()
    link.tick(2.0 + SyncerConfig().timeouts.round)
    assert [a for a in link.take() if isinstance(a, Fail | Reconnect)]
