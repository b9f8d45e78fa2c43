"""The tape and status.json on a disk that takes no more, and then does again."""

from __future__ import annotations

import json
import logging

import pytest

from dd_lightning.protocol.tape import TapeError, TapeWriter, read_tape
from dd_lightning.syncer.telemetry import StatusFile, TapeFeed
from tests.file_limits import limiter

pytestmark = pytest.mark.unit
TEXT = "x" * 100


@pytest.fixture
def disk(request):
    """Files may grow to so many bytes; None: as far as they like."""
    return limiter(request)


@pytest.fixture
def tape(tmp_path):
    writer = TapeWriter(tmp_path / "tape.jsonl", most_waiting_bytes=1000)
    yield writer
    writer._file.close()


def texts(writer: TapeWriter) -> list[str]:
    return [event["text"] for event in read_tape(writer.path)]


def test_rows_wait_in_order_and_a_half_row_is_completed(tape, disk) -> None:
    disk(200)  # the second row does not fit
    for number in range(5):
        tape.write("warning", number, text=f"{number} {TEXT}")
    assert tape.path.stat().st_size == 200 and tape.num_waiting == 4
    assert texts(tape) == [f"0 {TEXT}"]  # a reader meanwhile sees whole rows only
    with pytest.raises(OSError, match="rows of the tape wait"):
        tape.sync()
    disk(None)
    assert tape.flush()
    tape.sync()
    tape.write("warning", 5.0, text="after")
    assert texts(tape) == [*(f"{number} {TEXT}" for number in range(5)), "after"]


def test_beyond_the_bound_it_raises_and_drops_nothing(tape, disk) -> None:
    disk(0)
    with pytest.raises(TapeError, match="rather than with a hole"):
        for number in range(100):
            tape.write("warning", number, text=f"{number} {TEXT}")
    assert 5 < tape.num_waiting < 10
    waiting = tape.num_waiting
    disk(None)
    tape.close()
    assert texts(tape) == [f"{number} {TEXT}" for number in range(waiting)]


def test_what_a_killed_writer_left_half_is_cut_by_the_next(tape, disk, tmp_path) -> None:
    disk(200)
    for number in range(2):
        tape.write("warning", number, text=TEXT)
    disk(None)
    again = TapeWriter(tape.path)  # the process died with the rest in memory
    again.write("warning", 2.0, text="resumed")
    again.close()
    assert texts(tape) == [TEXT, "resumed"]


def test_closing_on_a_full_disk_says_what_is_lost(tape, disk) -> None:
    disk(0)
    tape.write("warning", 0.0, text=TEXT)
    with pytest.raises(TapeError, match="lacks its last 1 rows"):
        tape.close()


def test_the_feed_says_it_once_and_puts_it_on_the_tape(tape, disk, caplog) -> None:
    feed = TapeFeed(tape)
    disk(0)
    with caplog.at_level(logging.WARNING):
        feed.write("warning", 1.0, {"text": "first"})
        feed.write("warning", 2.0, {"text": "second"})
    assert len(caplog.messages) == 1 and "Free space in the run's folder" in caplog.messages[0]
    with pytest.raises(TapeError, match="the last 3 rows of the tape are lost"):
        feed.finish(0.2)
    disk(None)
    assert feed.flush()
    feed.finish(0.0)
    said = texts(tape)
    assert said[0] == "first" and said[1] == caplog.messages[0] and said[2] == "second"


def test_status_json_stays_as_it_was(tmp_path, disk) -> None:
    said = []
    status = StatusFile(tmp_path / "status.json", warn=lambda text, t_s: said.append((text, t_s)))
    status.write({"state": "running"}, 1.0)
    disk(4)
    for now in (2.0, 3.0):
        status.write({"state": "later"}, now)
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "running"}
    assert [now for _, now in said] == [2.0] and "what it shows is old" in said[0][0]
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    disk(None)
    status.write({"state": "later"}, 4.0)
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "later"}
