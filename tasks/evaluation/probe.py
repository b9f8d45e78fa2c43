"""How well classes can be told apart by a model's features, frozen or fine-tuned, by k-fold
cross-validation."""

import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .features import frozen_features, pooled

FOLDS = 5
PENALTY = 1e-3  # of the squared weights, on the mean loss of standardised features


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of right answers, 0..1: mean over folds, and the sample standard deviation."""

    mean: float
    spread: float

    @classmethod
    def of(cls, folds: Sequence[float]) -> "Accuracy":
        return cls(statistics.fmean(folds), statistics.stdev(folds) if len(folds) > 1 else 0.0)


def folds(count: int, seed: int, num_folds: int = FOLDS) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices to train on and to test on; each sample is tested once."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    parts = order.chunk(num_folds)
    for number, part in enumerate(parts):
        yield torch.cat([*parts[:number], *parts[number + 1 :]]), part


def majority(labels: Tensor) -> float:
    """Accuracy of always answering the most frequent class."""
    return float(labels.bincount().max()) / len(labels)


def frozen_probe(features: Tensor, labels: Tensor, seed: int = 0) -> Accuracy:
    """Logistic regression on features `[samples, D]`, labels `[samples]` 0..C-1."""
    return Accuracy.of(
        [
            _right(regression(features[train], labels[train])(features[test]), labels[test])
            for train, test in folds(len(labels), seed)
        ]
    )


def regression(features: Tensor, labels: Tensor) -> nn.Module:
    """Logistic regression, fitted to its optimum on standardised features."""
    mean, deviation = features.mean(0), features.std(0).clamp(min=1e-6)
    head = nn.Linear(features.shape[1], int(labels.max()) + 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    inputs = (features - mean) / deviation
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(head(inputs), labels) + PENALTY * head.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():  # standardisation as part of the layer
        head.weight /= deviation
        head.bias -= head.weight @ mean
    return head


@dataclass(frozen=True, slots=True)
class FineTuning:
    """All parameters and a new layer on the mean hidden state, by AdamW.

    Args:
        folds: how many of the five are played; each trains the model anew.
        lr: peak of a linear rise and fall.
    """

    folds: int = 1
    epochs: int = 2
    batch_size: int = 32
    lr: float = 1e-3

    def __post_init__(self) -> None:
        for name, most in (("folds", FOLDS), ("epochs", 100)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed are 1..{most}")

    def __call__(
        self, module: nn.Module, texts: Sequence[np.ndarray], labels: Tensor, length: int, seed: int
    ) -> Accuracy:
        """Accuracy on the texts of each fold, after training on the others; `module` stays."""
        played = list(folds(len(labels), seed))[: self.folds]
        return Accuracy.of(
            [self._fold(module, texts, labels, length, seed, *fold) for fold in played]
        )

    def _fold(
        self,
        module: nn.Module,
        texts: Sequence[np.ndarray],
        labels: Tensor,
        length: int,
        seed: int,
        train: Tensor,
        test: Tensor,
    ) -> float:
        # begins at the frozen probe's answer, so that what is gained is fine-tuning's
        module = copy.deepcopy(module)
        head = regression(
            frozen_features(module, [texts[i] for i in train], length), labels[train]
        ).requires_grad_()
        module.train()
        parameters = [*module.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.01)
        draw = torch.Generator().manual_seed(seed)
        batches = [
            train[batch]
            for _ in range(self.epochs)
            for batch in torch.randperm(len(train), generator=draw).split(self.batch_size)
        ]
        rise = max(1, len(batches) // 10)
        for step, batch in enumerate(batches):
            left = (len(batches) - step) / len(batches)
            optimizer.param_groups[0]["lr"] = self.lr * min((step + 1) / rise, left)
            optimizer.zero_grad()
            logits = head(pooled(module, [texts[i] for i in batch], length))
            F.cross_entropy(logits, labels[batch]).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        features = frozen_features(module, [texts[i] for i in test], length)
        return _right(head(features), labels[test])


def _right(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) == labels).float().mean())
