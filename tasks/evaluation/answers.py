"""All questions to one trained model, answered as plain values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dd_lightning.tasks.text.tokenizer import BytePairTokenizer, ByteTokenizer

from .held_out import MAX_BYTES, Reader, bits_per_byte, passages
from .probe import FineTuning, frozen_features, frozen_probe, majority
from .reviews import Review, load_reviews

REVIEWS = ("frozen", "fine_tuned")
# Measured once, five folds: what a simple method reaches.
REFERENCES = {
    "reviews": {"majority": 0.504, "TF-IDF of words and pairs, logistic regression": 0.805},
    "digits": {"majority": 0.102, "logistic regression on pixels": 0.919},
    "openmoji": {"majority": 0.203, "nearest neighbour on pixels": 0.597},
}


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked beside the task's own validation.

    Args:
        text: sources of held-out text, "docs" and "sotu" (7 MB by npm).
        reviews: "frozen", "fine_tuned" or both (2.5 MB by pip).
        passages: of each source, 1 kB each.
        seed: of the folds and of fine-tuning's order.
    """

    text: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()
    passages: int = 128
    seed: int = 0
    fine_tuning: FineTuning = field(default_factory=FineTuning)

    def __post_init__(self) -> None:
        for name, allowed in (("text", tuple(MAX_BYTES)), ("reviews", REVIEWS)):
            if wrong := [one for one in getattr(self, name) if one not in allowed]:
                raise ValueError(f"{name} is {wrong[0]!r}, allowed are {allowed}")
        if self.passages < 1:
            raise ValueError(f"passages is {self.passages!r}, allowed are integers >= 1")


def evaluate(
    module: nn.Module, task: Mapping[str, Any], questions: Questions, cache_dir: Path
) -> dict[str, Any]:
    """The answers, and what simpler methods reach.

    Args:
        module: as trained; unchanged after the call.
        task: `task` of the run's configuration.

    Raises:
        ValueError: a question about text to a model of something else.
    """
    answers: dict[str, Any] = {}
    if questions.text or questions.reviews:
        reader = reader_of(module, task)
    if questions.text:
        answers["bits_per_byte"] = {
            source: bits_per_byte(module, passages(source, cache_dir, questions.passages), reader)
            for source in questions.text
        }
    if questions.reviews:
        answers["reviews"] = ask_reviews(module, load_reviews(cache_dir), reader, questions)
        answers["references"] = {"reviews": REFERENCES["reviews"]}
    source = task["data"].get("source")
    if task["name"] == "vision" and source in REFERENCES:
        answers["references"] = {source: REFERENCES[source]}
    return answers


def reader_of(module: nn.Module, task: Mapping[str, Any]) -> Reader:
    """How the model reads text, by its task's data.

    Raises:
        ValueError: it is no language model.
    """
    if not hasattr(module, "features") or "sequence_length" not in task["data"]:
        raise ValueError(
            f"held-out text and reviews are asked of a model of task {task['name']!r}; allowed: "
            "a language model, whose module has features(ids [B, S]) -> [B, S, D] as GPTModule "
            "has. Leave these questions out: its own validation is always reported."
        )
    tokenizer: ByteTokenizer | BytePairTokenizer = ByteTokenizer()
    if task["data"].get("tokenizer", "bytes") != "bytes":
        from hydra.utils import instantiate

        datamodule = instantiate(dict(task["data"]), _convert_="all")
        datamodule.prepare_data()
        tokenizer = BytePairTokenizer.load(datamodule.folder)
    return Reader(tokenizer, task["data"]["sequence_length"])


def ask_reviews(
    module: nn.Module, reviews: list[Review], reader: Reader, questions: Questions
) -> dict[str, Any]:
    """Accuracies on film reviews, with the number of them."""
    texts: list[np.ndarray] = [reader.tokenizer.encode(review.text.encode()) for review in reviews]
    labels = torch.tensor([int(review.positive) for review in reviews])
    answers: dict[str, Any] = {"count": len(reviews), "majority": majority(labels)}
    if "frozen" in questions.reviews:
        features = frozen_features(module, texts, reader.length)
        answers["frozen"] = asdict(frozen_probe(features, labels, questions.seed))
    if "fine_tuned" in questions.reviews:
        found = questions.fine_tuning(module, texts, labels, reader.length, questions.seed)
        answers["fine_tuned"] = asdict(found)
    return answers
