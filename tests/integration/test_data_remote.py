"""Data over HTTP from a server on loopback: prepared shards, and a user's own tars."""

import pytest
import torch

from dd_lightning.protocol.tape import read_tape
from dd_lightning.tasks.data import fetch, read_manifest
from dd_lightning.tasks.vision import VisionData
from dd_lightning.tasks.vision_language import VisionLanguageData
from tests.named_pictures import NAMES, write_named
from tests.shard_stores import LIKE, prepared_text, served, take, text_at
from tests.simulated_runs import QUICK, simulate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared_text(tmp_path_factory.mktemp("source"))


@pytest.fixture
def server(made, monkeypatch):
    monkeypatch.setattr(fetch, "RETRY_AFTER_S", 0.01)
    with served(made.folder) as server:
        yield server


def test_training_and_resuming_over_http_see_what_the_folder_has(made, server, tmp_path):
    datamodule = text_at(server.url, tmp_path)
    datamodule.prepare_data()
    whole = take(made, 60)
    asked = [name for name in server.asked if name.endswith(".tar")]
    assert asked == []
    assert torch.equal(take(datamodule, 30), whole[:30])
    tars = [name for name in server.asked if name.endswith(".tar")]
    assert 1 <= len(tars) == len(set(tars)) < 8  # those it reached, each once
    again = text_at(server.url, tmp_path / "elsewhere")
    again.prepare_data()
    again.load_state_dict({**datamodule.state_dict(), "samples": 4 * 30, "batches": 30})
    assert torch.equal(take(again, 30), whole[30:])


def test_a_killed_learner_goes_on_with_shards_of_a_server(server, tmp_path):
    shards = ["source=shards", f"path={server.url}", "tokenizer=bpe", "vocabulary=270"]
    shards += [f"{name}={value}" for name, value in LIKE.items()]
    simulate(
        tmp_path / "data", tmp_path / "run", *(f"task.data.{one}" for one in shards),
        "task.module.gpt.width=16", "task.module.gpt.depth=1", "trainer.max_steps=40",
        "chaos=kill_learner", "chaos.at_step=12", "chaos.not_before=start", base=QUICK,
    )  # fmt: skip
    joins = [one for one in read_tape(tmp_path / "run" / "tape.jsonl") if one["event"] == "join"]
    assert [one["data_position"] for one in joins if one["learner"] == "1"] == [0, 12]
    tars = [name for name in server.asked if name.endswith(".tar")]
    assert len(tars) == len(set(tars)) and any("validation" in name for name in tars)


def test_loader_processes_fetch_too(made, server, tmp_path):
    datamodule = text_at(server.url, tmp_path, num_workers=2)
    datamodule.prepare_data()
    assert torch.equal(take(datamodule, 40), take(made, 40))


def test_answers_that_break_off_are_asked_for_again(made, server, tmp_path):
    server.breaks = {"manifest.json": 2, "train-00000.tar": 3, "train-00001.tar": 4}
    datamodule = text_at(server.url, tmp_path)
    datamodule.prepare_data()
    with pytest.raises(ValueError, match=r"train-00001.tar could not be fetched in 4 tries"):
        datamodule.fetch_shards()
    assert server.asked.count("train-00000.tar") == 4
    datamodule.fetch_shards()  # what came before is kept, what did not comes now
    assert server.asked.count("train-00000.tar") == 4
    read_manifest(datamodule.folder, verify=True)


def test_a_server_that_has_no_such_data_or_is_gone_is_named(made, server, tmp_path):
    with pytest.raises(ValueError, match=r"nothing/manifest.json cannot be opened"):
        text_at(f"{server.url}/nothing", tmp_path).prepare_data()
    with pytest.raises(ValueError, match=r"127.0.0.1:9/.* in 4 tries"):
        text_at("http://127.0.0.1:9/x", tmp_path).prepare_data()


def test_tars_of_one_s_own_are_read_over_http_and_known_by_their_content(tmp_path):
    local = write_named(tmp_path / "tars")
    given = {"source": "webdataset", "size": 8, "num_shards": 8}
    with served(tmp_path / "tars") as server:
        url = f"{server.url}/x-{{0..1}}.tar"
        there = VisionLanguageData(**given, path=url, cache_dir=str(tmp_path / "there"))
        here = VisionLanguageData(**given, path=local, cache_dir=str(tmp_path / "here"))
        before = there.folder()
        manifests = [read_manifest(one.prepare(), verify=True) for one in (there, here)]
        assert manifests[0].train == manifests[1].train
        assert sum(shard.samples for shard in manifests[0].train) > 10 * len(NAMES)
        write_named(tmp_path / "tars", each=21)
        assert there.folder() != before  # another size: other content
        with pytest.raises(ValueError, match=r"x-9.tar cannot be opened \(FileNotFoundError\)"):
            VisionData(source="webdataset", path=f"{server.url}/x-9.tar", classes=3).folder()


def test_a_command_s_output_is_a_tar_too(tmp_path):
    """Webdataset's own `pipe:`, which fsspec has not."""
    write_named(tmp_path / "tars")
    path = f"pipe:cat {tmp_path}/tars/x-{{0..1}}.tar"
    data = VisionLanguageData(
        source="webdataset", path=path, size=8, num_shards=8, cache_dir=str(tmp_path / "cache")
    )
    assert len(read_manifest(data.prepare()).train) == 8
