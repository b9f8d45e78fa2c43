"""The tape's feed, odd peers once a minute, status.json, and what a tape may not name."""

from __future__ import annotations

import json

import pytest

from dd_lightning.protocol.tape import TapeWriter, read_tape
from dd_lightning.syncer.telemetry import OddPeers, StatusFile, TapeFeed, without_paths

pytestmark = pytest.mark.unit


@pytest.fixture
def feed(tmp_path):
    heard = []
    tape = TapeWriter(tmp_path / "tape.jsonl")
    yield TapeFeed(tape, [heard.append]), heard, tmp_path / "tape.jsonl"
    tape.close()


def test_listeners_hear_what_the_tape_says_and_an_arrival_keeps_its_time(feed) -> None:
    writer, heard, path = feed
    writer.write("warning", 2.0, {"text": "a", "t_s": 1.5})
    writer.write("warning", 2.5, {"text": "b"})
    assert list(read_tape(path)) == heard
    assert [event["t_s"] for event in heard] == [1.5, 2.5]


def test_a_peer_is_named_once_a_minute_with_its_count(feed, caplog) -> None:
    writer, heard, _ = feed
    odd = OddPeers(writer)
    for now in (0.0, 1.0, 59.0, 61.0):
        odd.saw("10.0.0.1", "not msgpack", now)
    odd.saw("10.0.0.2", "not msgpack", 62.0)
    assert [event["count"] for event in heard] == [1, 3, 1]
    assert odd.total == 5
    assert len(caplog.records) == 3


def test_a_host_that_connects_again_and_again_is_one_peer(feed) -> None:
    writer, heard, _ = feed
    odd = OddPeers(writer)
    for number in range(50):
        odd.saw(f"10.0.0.1:{40000 + number}", "closed without a word", float(number))
        odd.saw(f"::1:{40000 + number}", "closed without a word", float(number))
    assert len(heard) == 2 and odd.total == 100


def test_many_strangers_take_bounded_memory(feed) -> None:
    odd = OddPeers(feed[0])
    for number in range(3000):
        odd.saw(str(number), "not msgpack", 0.0)
    assert len(odd._said_s) <= 1024 and len(odd._counts) <= 1024


def test_status_is_due_once_a_second(tmp_path) -> None:
    status = StatusFile(tmp_path / "status.json")
    assert status.due(0.0)
    status.write({"merges": 3}, 0.0)
    assert not status.due(0.9) and status.due(1.0)
    assert json.loads((tmp_path / "status.json").read_text()) == {"merges": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_no_folder_of_this_machine_gets_on_a_tape() -> None:
    values = {"data": {"root": "/data/shards/"}, "list": ["/a/b", "tcp://h:1"], "n": 3}
    assert without_paths(values) == {"data": {"root": "shards"}, "list": ["b", "tcp://h:1"], "n": 3}
