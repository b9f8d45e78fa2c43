"""Sample by sample through three kills: of what counts nothing is missing or twice in an epoch;
what is drawn again is what the dead had not reported, as the tape says."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest

from dd_lightning.protocol.tape import read_tape
from dd_lightning.tasks.vision import VisionDataModule
from tests.pictures import write_pictures
from tests.simulated_runs import QUICK, simulate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

BATCH, STEPS, SHARDS = 4, 60, 8
KILLS = (
    {"target": "0", "at_step": 20},
    {"target": "1", "at_step": 30},
    {"target": "0", "at_step": 45},
)


@dataclass
class Life:
    """What one incarnation of a learner drew from its slot: positions, in samples."""

    slot: int
    starts: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The lives of all learners of a run with `KILLS`, its tape, and the stream of each slot."""
    folder = tmp_path_factory.mktemp("ledger")
    lives, streams = {}, {}

    def augment(module, batch, position):
        _, slot, _, start = position
        lives.setdefault(id(module), (module, Life(slot)))[1].starts.append(start)
        streams[slot] = module._stream
        return batch

    pictures = write_pictures(folder / "pictures")
    faults = ", ".join(
        f"{{kind: kill, target: {k['target']}, at_step: {k['at_step']}}}" for k in KILLS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VisionDataModule, "augment", augment)
        simulate(
            folder / "data", folder / "run", "task=vision", f"trainer.max_steps={STEPS}",
            "learners=2", "task.data.source=folder", "task.data.classes=4",
            f"task.data.path={pictures}", f"task.data.batch_size={BATCH}",
            f"task.data.num_shards={SHARDS}", "task.module.vit.depth=1", "chaos=plan",
            f"chaos.faults=[{faults}]", "chaos.not_before=start", "checkpoint.every_s=0.5",
            base=QUICK,
        )  # fmt: skip
    tape = list(read_tape(folder / "run" / "tape.jsonl"))
    return [life for _, life in lives.values()], tape, streams


def samples(streams, slot, start, count):
    """Ids (shard, place) of samples start .. start + count of a slot's sequence."""
    return list(itertools.islice(streams[slot].positions(start), count))


def of_slot(drawn, slot):
    """The slot's lives in order, and where each began as the tape has it, in samples."""
    lives, tape, _ = drawn
    joins = [event for event in tape if event["event"] == "join"]
    mine = [join["data_position"] * BATCH for join in joins if join["learner"] == str(slot)]
    return [life for life in lives if life.slot == slot], mine


def test_the_kills_fired_and_all_came_back(drawn):
    lives, tape, _ = drawn
    assert sum(event["event"] == "fault" and event["fired"] is not None for event in tape) == 3
    assert Counter(life.slot for life in lives) == {0: 3, 1: 2}


@pytest.mark.parametrize("slot", [0, 1])
def test_each_life_goes_on_where_the_last_was_heard_of(drawn, slot):
    lives, begins = of_slot(drawn, slot)
    assert [life.starts[0] for life in lives] == begins
    for life in lives:  # batch after batch, none left out
        assert life.starts == list(range(life.starts[0], life.starts[-1] + 1, BATCH))
    for dead, begin in zip(lives, begins[1:], strict=False):
        assert dead.starts[0] < begin <= dead.starts[-1] + BATCH  # no gap; the rest was unreported


@pytest.mark.parametrize("slot", [0, 1])
def test_of_what_counts_no_sample_is_missing_or_seen_twice_in_an_epoch(drawn, slot):
    lives, begins = of_slot(drawn, slot)
    stream = drawn[2][slot]
    ends = [*begins[1:], lives[-1].starts[-1] + BATCH]
    seen = [
        sample
        for begin, end in zip(begins, ends, strict=True)
        for sample in samples(drawn[2], slot, begin, end - begin)
    ]
    epoch = stream.samples_per_epoch
    assert len(seen) > 2 * epoch  # the kills lie in different epochs
    own = {(shard, int(place)) for shard, places in stream.owned.items() for place in places}
    for first in range(0, len(seen) - epoch + 1, epoch):
        counts = Counter(seen[first : first + epoch])
        assert set(counts) == own and set(counts.values()) == {1}


def test_slots_share_no_sample(drawn):
    _, _, streams = drawn
    shards = [set(stream.owned) for stream in streams.values()]
    assert not shards[0] & shards[1] and shards[0] | shards[1] == set(range(SHARDS))
