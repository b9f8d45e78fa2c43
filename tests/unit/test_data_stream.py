"""The shard stream: slots disjoint and complete, order repeatable, resume exact anywhere."""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from dd_lightning.tasks.data import ShardStream, StreamPlan, write_shards

pytestmark = pytest.mark.unit

SAMPLES = 50
NUM_SHARDS = 8


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    records = [{"bin": str(i).encode()} for i in range(SAMPLES)]
    return folder, write_shards(folder, "train", records, NUM_SHARDS)


def collate(samples) -> list[int]:
    return [int(sample["bin"]) for sample in samples]


def stream(prepared, batch_size: int = 3, start: int = 0, **plan) -> ShardStream:
    made = ShardStream(*prepared, StreamPlan(**plan), batch_size, collate)
    made.start = start
    return made


def take(batches, count: int) -> list[list[int]]:
    return list(itertools.islice(iter(batches), count))


def epoch(prepared, number: int = 0, **plan) -> list[int]:
    one = stream(prepared, batch_size=1, **plan)
    one.start = number * one.samples_per_epoch
    return [sample for (sample,) in take(one, one.samples_per_epoch)]


@pytest.mark.parametrize("slots", [1, 3, 4, 8])
def test_slots_are_disjoint_and_complete(prepared, slots):
    shares = [epoch(prepared, data_slot=s, num_data_slots=slots) for s in range(slots)]
    assert Counter(itertools.chain(*shares)) == Counter(range(SAMPLES))


def test_slots_stay_disjoint_across_epochs_and_seeds(prepared):
    first = {x for e in range(3) for x in epoch(prepared, e, data_slot=0, num_data_slots=2, seed=1)}
    second = {
        x for e in range(3) for x in epoch(prepared, e, data_slot=1, num_data_slots=2, seed=9)
    }
    assert first | second == set(range(SAMPLES))
    assert not first & second


def test_ranks_split_a_slot(prepared):
    plan = {"data_slot": 1, "num_data_slots": 2, "num_ranks": 2}
    shares = [epoch(prepared, rank=rank, **plan) for rank in range(2)]
    whole = epoch(prepared, data_slot=1, num_data_slots=2)
    assert Counter(shares[0] + shares[1]) == Counter(whole)


def test_another_job_s_rank_in_the_environment_changes_nothing(prepared, monkeypatch):
    expected = epoch(prepared, data_slot=1, num_data_slots=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert epoch(prepared, data_slot=1, num_data_slots=2) == expected


def test_order_depends_on_seed_and_epoch_and_nothing_else(prepared):
    torch.manual_seed(1)
    first = epoch(prepared, seed=3)
    torch.manual_seed(2)
    assert epoch(prepared, seed=3) == first
    orders = [first, epoch(prepared, 1, seed=3), epoch(prepared, seed=4)]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("start", [0, 1, 2, 9, 16, 17, 33, 40, 75])
def test_resuming_equals_going_on(prepared, start):
    plan = {"data_slot": 0, "num_data_slots": 2, "seed": 5}
    whole = take(stream(prepared, **plan), start + 12)
    assert take(stream(prepared, start=3 * start, **plan), 12) == whole[start:]


def test_resuming_with_another_batch_size_goes_on_at_the_sample(prepared):
    whole = list(itertools.chain(*take(stream(prepared, batch_size=3), 30)))
    resumed = list(itertools.chain(*take(stream(prepared, batch_size=5, start=21), 10)))
    assert resumed == whole[21 : 21 + 50]


@pytest.mark.parametrize("processes", [1, 2])
def test_loader_processes_do_not_change_the_batches(prepared, processes):
    expected = take(stream(prepared, start=6), 25)
    loader = DataLoader(stream(prepared, start=6), batch_size=None, num_workers=processes)
    assert [list(map(int, batch)) for batch in take(loader, 25)] == expected


def test_too_few_shards_say_how_many_are_needed(prepared):
    with pytest.raises(ValueError, match=r"8 training shards.*at least 12.*num_shards=12"):
        stream(prepared, num_data_slots=6, num_ranks=2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"data_slot": 4, "num_data_slots": 4}, r"data_slot is 4, allowed are.*0\.\.3"),
        ({"rank": -1}, "rank is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_plans_are_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        StreamPlan(**plan)


def test_a_batch_needs_a_sample(prepared):
    with pytest.raises(ValueError, match="batch_size is 0"):
        stream(prepared, batch_size=0)
