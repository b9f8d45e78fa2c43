"""Connections, faults and silences of the simulated network."""

from __future__ import annotations

import pytest

from dd_lightning.learner.dialing import Bounds
from dd_lightning.network.connection import SOCKET_BUFFER_BYTES
from dd_lightning.network.link import LinkModel
from dd_lightning.network.profiles import WanProfile
from dd_lightning.simulate.handshake import CHANNEL_ROUND_TRIPS
from dd_lightning.transport.frames import Arrival, Disconnected, Malformed, payload_fault
from tests.transport_samples import fragment
from tests.virtual_links import PROGRESS, SILENCE_S, Links, arrivals, profile

pytestmark = pytest.mark.unit

RTT_S = 0.08
NONE = WanProfile("none", ("local",), {}, "local", ("local",))
WHO = ("0", "1")


def cut(learner: str = "0", seconds: float = 5.0, **more: float) -> dict:
    return {"do": "cut", "learner": learner, "seconds": seconds, **more}


def test_without_links_everything_is_there_at_once():
    links = Links(NONE)
    session = links.connect()
    links.upload(session, 10_000_000)
    links.syncer.send(session.name, PROGRESS)
    links.play(0.0)
    assert arrivals(links.at_syncer) == arrivals(links.at_learner[0]) == [0.0]


def test_a_connection_costs_its_round_trips_and_nobody_at_home_one():
    links = Links(profile())
    assert links.connect().handshake_s == pytest.approx(CHANNEL_ROUND_TRIPS * RTT_S)
    links.syncer.close()
    began = links.time.now
    assert isinstance(links.dial(0), ConnectionRefusedError)
    assert links.time.now - began == pytest.approx(RTT_S)


def test_a_payload_takes_what_the_link_model_says():
    links = Links(profile(tcp="none"))
    session = links.connect()
    began = links.upload(session, 3_000_000)
    assert not session.is_free("up")
    links.play(20.0)
    size = links.at_syncer[0][1].num_bytes
    (took_s,) = (at - began for at in arrivals(links.at_syncer))
    assert took_s == pytest.approx(LinkModel(profile(tcp="none")).path("a", "up").send(0, size))


def test_a_control_message_does_not_wait_for_the_whole_payload_before_it():
    links = Links(profile(tcp="none"))
    session = links.connect()
    began = links.upload(session, 10_000_000)
    session.send("up", PROGRESS)
    links.play(20.0)
    first, second = arrivals(links.at_syncer)
    assert first - began < 0.1 < 1.0 < second - began


# ------------------------------------------------------------------ cuts


def test_a_cut_link_delivers_nothing_and_only_that_one():
    links = Links(profile(), controlled=WHO)
    sessions = [links.connect(0), links.connect(1)]
    began = links.time.now
    links.network.control(cut(seconds=0.5))
    for session in sessions:
        session.send("up", PROGRESS)
        links.syncer.send(session.name, PROGRESS)
    links.play(began + 5)
    times = {event.session: at for at, event in links.at_syncer if isinstance(event, Arrival)}
    assert times[sessions[1].name] == pytest.approx(began + RTT_S / 2, abs=0.001)
    assert began + 0.5 <= times[sessions[0].name] <= began + 2.1 * 0.5 + 1.0
    assert began + 0.5 <= arrivals(links.at_learner[0])[0] <= began + 2.1 * 0.5 + 1.0


def test_a_long_cut_ends_the_session_at_the_learner_and_later_at_the_syncer():
    links = Links(profile(), controlled=WHO)
    session = links.connect()
    links.play(3.0)
    links.network.control(cut(seconds=30.0))
    began = links.time.now
    session.send("up", PROGRESS)
    links.play(began + 60)
    ((at, event),) = links.at_learner[0]
    assert isinstance(event, Disconnected) and "dead path" in event.reason and session.was_silent
    assert at - began + 0.6 >= SILENCE_S and at - began <= SILENCE_S + RTT_S
    ((at, event),) = links.at_syncer  # what was sent in the cut came when nobody took it any more
    assert isinstance(event, Disconnected)
    assert 9.0 <= at - began <= 10.0 + RTT_S


def test_in_a_short_cut_what_was_sent_comes_late_before_the_close():
    links = Links(profile(), controlled=WHO)
    session = links.connect()
    links.play(3.0)
    links.network.control(cut(seconds=4.0))
    began = links.time.now
    session.send("up", PROGRESS)
    links.play(began + 20)
    assert [type(event) for _, event in links.at_syncer] == [Arrival, Disconnected]
    assert began + 4.0 <= links.at_syncer[0][0] <= began + 2.1 * 4 + 1


def test_dials_in_a_cut_time_out_and_after_it_the_first_one_succeeds():
    links = Links(profile(), controlled=WHO)
    links.connect()
    short = Bounds(0.5, 0.5)
    over_s = links.time.now + 5.0
    links.network.control(cut(seconds=5.0))
    while links.time.now < over_s:
        began = links.time.now
        found = links.dial(0, short)
        if began < over_s - 0.5:
            assert isinstance(found, TimeoutError) and links.time.now == began + 0.5
    links.dial(0, short)
    assert links.time.now <= over_s + 0.5 + CHANNEL_ROUND_TRIPS * RTT_S
    names = {session.name for session in links.syncer._sessions.values()}
    assert len(names) == 2  # the old one, of which the syncer has not heard, and one new


def test_an_upload_cut_off_in_the_middle_is_lost_as_a_whole():
    links = Links(profile(), controlled=WHO)
    session = links.connect()
    links.play(1.0)
    links.upload(session, 20_000_000)  # 2 s
    links.play(2.0)
    links.network.control(cut(seconds=30.0))
    links.play(60.0)
    flow = session.flows["up", b"d"]
    assert arrivals(links.at_syncer) == []
    assert flow.num_arrived_bytes > 0
    assert flow.num_sent_bytes == flow.num_arrived_bytes + flow.num_lost_bytes


def test_what_the_kernel_has_is_sent_although_its_process_is_gone():
    links = Links(profile())
    session = links.connect()
    links.upload(session, SOCKET_BUFFER_BYTES // 2)
    session.close_at_learner()
    links.play(20.0)
    assert len(arrivals(links.at_syncer)) == 1


def test_a_flapping_link_keeps_its_session_where_each_cut_is_short():
    links = Links(profile(), controlled=WHO)
    session = links.connect()
    links.network.control(cut(seconds=0.3, times=5, every_s=3.0))
    for second in range(1, 15):
        links.play(second)
        session.send("up", PROGRESS)
    links.play(30.0)
    assert len(arrivals(links.at_syncer)) == 14 and not links.at_learner[0]


def test_an_outage_of_the_profile_does_what_a_cut_does():
    links = Links(profile(({"region": "a", "start_s": 5.0, "seconds": 20.0},)))
    sessions = [links.connect(0), links.connect(1)]
    links.play(60.0)
    ((at, event),) = links.at_learner[0]
    assert isinstance(event, Disconnected) and 5.0 < at <= 5.0 + SILENCE_S + RTT_S
    assert links.at_learner[1] == [] and sessions[1].open_at_syncer


def test_where_nothing_can_fall_silent_no_heartbeat_is_sent():
    links = Links(profile())
    session = links.connect()
    links.play(100.0)
    assert all(flow.num_sent_bytes == 0 for flow in session.flows.values())


# ------------------------------------------------------------------ other faults


def test_a_throttled_link_is_slow_while_it_lasts():
    took_s = []
    for share in (None, 0.1):
        links = Links(profile(tcp="none"), controlled=WHO)
        session = links.connect()
        if share is not None:
            command = {"do": "throttle", "learner": "0", "seconds": 100.0, "share": share}
            links.network.control(command)
        began = links.upload(session, 1_000_000)
        links.play(50.0)
        took_s.append(arrivals(links.at_syncer)[0] - began - RTT_S / 2)
    assert took_s[1] == pytest.approx(10 * took_s[0], rel=0.02)


def test_a_damaged_message_ends_the_session_and_a_damaged_payload_is_the_protocols():
    seen = set()
    for seed in range(20):
        links = Links(profile(), seed=seed, controlled=WHO)
        session = links.connect()
        links.play(1.0)
        command = {"do": "corrupt", "learner": "0", "seconds": 0.2, "flips": 1}
        links.network.control(command)
        links.upload(session, 100)
        links.play(5.0)
        kinds = tuple(type(event) for _, event in links.at_syncer)
        seen.add(kinds)
        if kinds == (Arrival,):
            event = links.at_syncer[0][1]
            assert payload_fault(event.message.payload, event.payload) == "checksum"
            assert session.open_at_learner
        else:
            assert isinstance(links.at_learner[0][0][1], Disconnected)
    assert seen == {(Arrival,), (Malformed, Disconnected)}


def test_a_damaged_message_to_a_learner_ends_its_session():
    links = Links(profile(), controlled=WHO)
    session = links.connect()
    links.network.control({"do": "corrupt", "learner": "0", "seconds": 1.0})
    links.syncer.send(session.name, PROGRESS)
    links.play(5.0)
    assert [type(event) for _, event in links.at_learner[0]] == [Disconnected]
    assert [type(event) for _, event in links.at_syncer] == [Disconnected]


def test_what_cannot_be_controlled_is_refused():
    links = Links(profile(), controlled=("0",))
    with pytest.raises(ValueError, match="learner '1' has no controlled link"):
        links.network.control(cut("1"))
    with pytest.raises(ValueError, match="no command"):
        links.network.control({"do": "explode", "learner": "0"})


def test_a_network_that_shapes_nothing_can_be_controlled():
    links = Links(NONE, controlled=("0",))
    session = links.connect()
    links.network.control(cut(seconds=1.0))
    session.send("up", PROGRESS)
    links.play(10.0)
    assert arrivals(links.at_syncer)[0] >= 1.0


def test_a_syncer_sends_one_payload_at_a_time():
    links = Links(profile())
    session = links.connect()
    data = bytes(1_000_000)
    assert links.syncer.send(session.name, fragment(data), data)
    assert not links.syncer.send(session.name, fragment(data), data)
    assert links.syncer.send(session.name, PROGRESS)
    links.play(5.0)
    assert links.syncer.send(session.name, fragment(data), data)
