"""Byte pairs: lossless, learned from training text alone, the same in every build; bits per byte
compare with bytes."""

import itertools
import json
import math
import os
import random
import subprocess
import sys

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from dd_lightning.tasks.data import read_manifest
from dd_lightning.tasks.text import GPTModule, TextData, TextDataModule
from dd_lightning.tasks.text import tokenizer as tokenizer_module
from dd_lightning.tasks.text.corpus import by_digest, is_validation
from dd_lightning.tasks.text.tokenizer import FILE, BytePairTokenizer, token_bytes

pytestmark = pytest.mark.unit

VOCABULARY = 300
WORDS = ("the", "learner", "syncer", "merges", "fragment", "12", "of", "round", "naïve", "(quorum)")


def texts(count: int = 60) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=60)) for _ in range(count)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index, text in enumerate(texts()):
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return {
        "source": "folder", "path": str(folder), "sequence_length": 16, "num_shards": 4,
        "tokenizer": "bpe", "vocabulary": VOCABULARY,
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip


def learned(count: int = 60) -> BytePairTokenizer:
    return BytePairTokenizer.learn([text.encode() for text in texts(count)], VOCABULARY)


def decoded(tokens: np.ndarray, tokenizer: BytePairTokenizer) -> bytes:
    return "".join(map(tokenizer.model.id_to_token, tokens.tolist())).encode("latin-1")


@pytest.mark.parametrize(
    "text",
    [b"the learner merges 12 fragments", bytes(range(256)), "naïve – 語".encode(), b"\xff\0"],
)
def test_any_bytes_come_back_as_they_were(text):
    tokenizer = learned()
    tokens = tokenizer.encode(text)
    assert decoded(tokens, tokenizer) == text
    assert tokens.dtype == np.uint16


def test_the_first_tokens_are_the_bytes_and_the_others_are_longer(tmp_path):
    tokenizer = learned()
    tokenizer.save(tmp_path)
    assert [tokenizer.model.token_to_id(chr(byte)) for byte in range(256)] == list(range(256))
    lengths = token_bytes(tmp_path)
    assert lengths.shape == (VOCABULARY,)
    assert (lengths[:256] == 1).all() and (lengths[256:] > 1).all()
    text = texts(1)[0].encode()
    tokens = BytePairTokenizer.load(tmp_path).encode(text)
    assert lengths[tokens].sum() == len(text) and len(tokens) < 0.5 * len(text)


def test_what_is_held_out_teaches_nothing(settings):
    data = TextData(**settings)
    train = [d.text for d in by_digest(data.documents()) if not is_validation(d, 5)]
    alone = BytePairTokenizer.learn(train, VOCABULARY).model.to_str()
    stored = json.loads((data.prepare() / FILE).read_text(encoding="utf-8"))
    assert stored == json.loads(alone)


def test_two_builds_are_byte_identical(settings, tmp_path):
    first = TextData(**settings).prepare()
    second = TextData(**{**settings, "cache_dir": str(tmp_path)}).prepare()
    names = sorted(path.name for path in first.iterdir())
    assert FILE in names and names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert FILE in read_manifest(second, verify=True).files
    (second / FILE).write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not what the manifest recorded"):
        read_manifest(second, verify=True)


def test_another_process_with_other_threads_learns_the_same(tmp_path):
    """The module's file alone: importing our package takes longer than all of this."""
    program = (
        "import importlib.util, json, sys; from pathlib import Path;"
        "spec = importlib.util.spec_from_file_location('tokenizer', sys.argv[1]);"
        "sys.modules['tokenizer'] = module = importlib.util.module_from_spec(spec);"
        "spec.loader.exec_module(module);"
        "texts = [text.encode() for text in json.load(sys.stdin)];"
        "module.BytePairTokenizer.learn(texts, int(sys.argv[2])).save(Path(sys.argv[3]))"
    )
    subprocess.run(
        [sys.executable, "-c", program, tokenizer_module.__file__, str(VOCABULARY), str(tmp_path)],
        check=True, input=json.dumps(texts()), text=True, timeout=100,
        env={**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    here = tmp_path / "here"
    here.mkdir()
    learned().save(here)
    assert (here / FILE).read_bytes() == (tmp_path / FILE).read_bytes()


def test_shards_hold_the_tokens_of_all_text(settings):
    datamodule = TextDataModule(**settings, batch_size=2)
    datamodule.prepare_data()
    batch = next(iter(datamodule.train_dataloader()))
    assert batch["input_ids"].shape == (2, 16) and int(batch["input_ids"].max()) >= 256
    lengths = torch.from_numpy(token_bytes(datamodule.folder))
    assert torch.equal(batch["num_bytes"], lengths[batch["labels"]].sum(-1))
    manifest = datamodule.manifest()
    assert (manifest.info["tokenizer"], manifest.info["vocabulary"]) == ("bpe", VOCABULARY)
    total = sum(int(b["num_bytes"].sum()) for b in batches(datamodule, epochs=1))
    train = sum(len(d.text) + 1 for d in datamodule.data.documents() if not is_validation(d, 5))
    assert train - 17 * int(lengths.max()) < total < train


def batches(datamodule, epochs: int):
    loader = datamodule.train_dataloader()
    count = epochs * datamodule._stream.samples_per_epoch // datamodule.batch_size
    return itertools.islice(iter(loader), count)


def test_bits_per_byte_are_those_of_the_text(settings):
    """A model that knows nothing: log2(vocabulary) bits a token, over the bytes of its tokens."""
    datamodule = TextDataModule(**settings)
    datamodule.prepare_data()
    gpt = {"vocabulary": VOCABULARY, "max_length": 16, "width": 8, "depth": 1, "heads": 1}
    module = GPTModule(gpt)
    torch.nn.init.zeros_(module.model.head.weight)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    found = trainer.validate(module, datamodule=datamodule, verbose=False)[0]
    validation = list(datamodule.val_dataloader())
    tokens = sum(batch["labels"].numel() for batch in validation)
    total = sum(int(batch["num_bytes"].sum()) for batch in validation)
    assert found["val_loss"] == pytest.approx(math.log(VOCABULARY), rel=1e-5)
    expected = math.log2(VOCABULARY) * tokens / total
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert total > 2 * tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "words"}, "task.data.tokenizer is 'words', allowed are"),
        ({"vocabulary": 256}, r"vocabulary is 256 with task.data.tokenizer=bpe, allowed are 257"),
        ({"vocabulary": 2**16 + 1}, "allowed are 257..65536"),
        ({"tokenizer": "bytes"}, r"vocabulary is 300 with task.data.tokenizer=bytes"),
        ({"vocabulary": 5000}, r"gives only \d+ tokens: set task.data.vocabulary=\d+ or add text"),
    ],
)
def test_wrong_vocabularies_are_refused(settings, changes, message):
    with pytest.raises(ValueError, match=message):
        TextData(**{**settings, **changes}).prepare()
