"""What the tape says of processes that were started again."""

import json

import pytest

from dd_lightning.launch.rejoins import Rejoins, TapeTail

pytestmark = pytest.mark.unit


def join(learner, cause="join"):
    return {"event": "join", "learner": learner, "generation": 1, "cause": cause}


def state(learner, name="training"):
    return {"event": "state", "learner": learner, "generation": 1, "state": name}


def merge(epoch):
    return {"event": "merge", "epoch": epoch}


SYNCER_START = [{"event": "syncer_start", "epoch": epoch} for epoch in range(4)]


@pytest.fixture
def rejoins():
    """Syncer and learner 0 at work in epoch 1."""
    found = Rejoins()
    for role in ("syncer", "learner 0"):
        found.started(role)
    for event in (SYNCER_START[1], join("0"), state("0"), merge(1)):
        found.feed(event)
    assert found.newly_joined() == ["syncer", "learner 0"] and found.missing() == []
    return found


def test_a_learner_is_missing_until_it_has_joined_and_made_a_step(rejoins):
    rejoins.expected("learner 0")
    (sentence,) = rejoins.missing()
    assert sentence == "learner 0 died, and its next life had not joined when the run ended"
    rejoins.started("learner 0")
    rejoins.feed(state("0"))  # of the life before
    assert rejoins.newly_joined() == []
    rejoins.feed(join("0"))
    assert rejoins.newly_joined() == ["learner 0"] and "had not finished a step" in str(
        rejoins.missing()
    )
    rejoins.feed(state("0"))
    assert rejoins.missing() == [] and rejoins.newly_joined() == []


def test_a_learner_that_has_no_step_left_is_back_when_it_hands_in(rejoins):
    rejoins.expected("learner 0")
    rejoins.started("learner 0")
    for event in (join("0"), state("0", "finishing")):
        rejoins.feed(event)
    assert rejoins.missing() == []


def test_a_re_attach_is_no_new_process(rejoins):
    rejoins.expected("learner 0")
    rejoins.started("learner 0")
    rejoins.feed(join("0", "re-attach"))
    assert rejoins.newly_joined() == []


def test_a_syncer_is_back_when_it_merges_in_its_own_epoch(rejoins):
    rejoins.expected("syncer")
    rejoins.started("syncer")
    for event in (SYNCER_START[2], merge(1)):
        rejoins.feed(event)
    assert rejoins.newly_joined() == ["syncer"]
    assert "had merged nothing yet" in rejoins.missing()[0]
    rejoins.feed(merge(2))
    assert rejoins.missing() == []


def test_a_syncer_that_finds_nothing_to_merge_and_ends_in_order_is_back(rejoins):
    rejoins.expected("syncer")
    rejoins.started("syncer")
    for event in (SYNCER_START[2], {"event": "run_end", "status": "finished"}):
        rejoins.feed(event)
    assert rejoins.missing() == []


def test_a_proxy_is_back_when_it_listens(rejoins):
    rejoins.started("proxy")
    rejoins.expected("proxy")
    rejoins.started("proxy")
    assert len(rejoins.missing()) == 1
    rejoins.listens("proxy")
    assert rejoins.newly_joined() == ["proxy"] and rejoins.missing() == []


def test_members_are_those_that_the_tape_lets_in_planned_or_not(rejoins):
    rejoins.feed(join("7"))
    assert rejoins.members == {"0", "7"} and rejoins.newly_joined() == []
    rejoins.feed({"event": "leave", "learner": "7"})
    rejoins.feed({"event": "dead", "learner": "0"})
    assert rejoins.members == set()
    rejoins.feed(join("7"))
    rejoins.feed(SYNCER_START[2])
    assert rejoins.members == set()


def test_a_tail_reads_whole_lines_once_and_skips_what_it_is_told_to(tmp_path):
    tape = tmp_path / "tape.jsonl"
    assert list(TapeTail(tape).new()) == []

    def append(event, end="\n"):
        with open(tape, "a") as file:
            file.write(json.dumps(event, separators=(",", ":")) + end)

    append(join("0"))
    tail, late = TapeTail(tape), TapeTail(tape, skip=tape.stat().st_size)
    append({"event": "contribution"})
    append(state("0"), end="")
    assert [event["event"] for event in tail.new()] == ["join"]
    append({}, end="")  # the torn line is cut off when the syncer starts again
    with open(tape, "rb+") as file:
        file.truncate(file.read().rindex(b"\n") + 1)
    append(merge(1))
    assert [event["event"] for event in tail.new()] == ["merge"]
    assert [event["event"] for event in late.new()] == ["merge"]
