"""Carries out Merge jobs on Θ: outer gradients, guard, merge rule, outer optimizer, buffers.

No Lightning, clock or socket: the SyncerModule, the simulator and tests call it with an optimizer.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dd_lightning.algorithm import (
    MERGE_RULES,
    from_delta,
    merge_buffers,
    merge_fragment,
    outer_gradient,
    reanchored,
    resolve,
    running_pairs,
    weighted_average,
)
from dd_lightning.algorithm.sums import squared_norm
from dd_lightning.crash_points import reach
from dd_lightning.protocol.actions import HeldContribution, Merge, MergeResult
from dd_lightning.protocol.config import AlgorithmConfig
from dd_lightning.protocol.messages import Version
from dd_lightning.syncer.payload import NON_FINITE, Encoded, encode_values
from dd_lightning.syncer.theta import Theta

KEPT_VERSIONS = 4
GUARD_LEAST = 3  # contributions below which a median says nothing about an outlier
UNKNOWN_BASE = "base"
NORM = "norm"


class OuterOptimizer(Protocol):
    """What a merge needs of a torch optimizer (Lightning's wrapper has it too)."""

    state: Any

    def step(self) -> Any:
        """Move every parameter that has a gradient."""
        ...


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge that was done, and the bytes of the fragment's new version."""

    job: Merge
    result: MergeResult
    published: Encoded


@dataclass(slots=True, eq=False)
class _Candidate:
    held: HeldContribution
    gradients: dict[str, Tensor]
    norm: float


def digest_of(published: Encoded) -> str:
    """sha256 over a fragment's values (float32, name order, buffers too), first 16 hex digits."""
    return hashlib.sha256(published.data).hexdigest()[:16]


class Merger:
    """Θ and the versions of it that contributions may be anchored at.

    Memory, in bytes per element of Θ: 4 for the masters and 4 for the published copy of each
    fragment, which `KEPT_VERSIONS` makes 16 while `keep_versions()` is true (a codec sends deltas,
    or a learner's parameters are 16-bit); the outer optimizer's state comes on top (SGD: 4).
    """

    def __init__(
        self,
        theta: Theta,
        algorithm: AlgorithmConfig,
        versions: Sequence[Version],
        keep_versions: Callable[[], bool],
    ) -> None:
        self.theta = theta
        self._keep_versions = keep_versions
        self._rule = resolve("merge", algorithm.merge, MERGE_RULES)
        self._max_norm_ratio = algorithm.max_norm_ratio
        self._shapes = {tensor.name: tensor.shape for tensor in theta.layout.tensors}
        self._versions: list[deque[tuple[Version, Encoded]]] = [
            deque([(version, self._encode(index))]) for index, version in enumerate(versions)
        ]

    def version(self, fragment: int) -> Version:
        """Version that Θ's fragment has now."""
        return self._versions[fragment][-1][0]

    def published(self, fragment: int) -> Encoded:
        """Bytes of the fragment's newest version."""
        return self._versions[fragment][-1][1]

    def merge(self, job: Merge, optimizer: OuterOptimizer) -> Merged:
        """Do `job`; other fragments' parameters and optimizer state are not touched.

        `optimizer.step()` is called exactly once, with no gradient set when nothing is to move (a
        re-anchor, or contributions without weight), so that it counts merges.
        """
        started = time.perf_counter()
        parameters, buffers = self.theta.fragment(job.fragment)
        candidates, rejected = self._candidates(job, parameters)
        self._guard(candidates, rejected)
        weighty = [one for one in candidates if one.held.weight > 0]
        agreement, cosine, outer_norm = None, None, 0.0
        if weighty and job.reanchor:
            self._reanchor(weighty, parameters, optimizer)
        elif weighty:
            agreement, cosine, outer_norm = self._put_gradient(weighty, parameters)
        optimizer.step()
        reach("merge.stepped")
        for parameter in parameters.values():
            parameter.grad = None
        if weighty:
            self._merge_buffers(weighty, buffers)
        staleness = tuple((one.held.learner, self._staleness(job, one.held)) for one in candidates)
        if candidates:  # a merge that refused everyone makes no version
            self._publish(job)
        published = self.published(job.fragment)
        result = MergeResult(
            digest=digest_of(published),
            agreement=agreement if len(weighty) > 1 else None,
            seconds=time.perf_counter() - started,
            outer_norm=outer_norm,
            rejected=tuple(sorted(rejected.items())),
            staleness=staleness,
            norms=tuple((one.held.learner, one.norm) for one in candidates),
            cosine=cosine,
        )
        return Merged(job, result, published)

    def _candidates(
        self, job: Merge, parameters: Mapping[str, Tensor]
    ) -> tuple[list[_Candidate], dict[str, str]]:
        candidates, rejected = [], {}
        for held in job.contributions:
            gradients = self._gradients(job.fragment, held, parameters)
            if gradients is None:
                rejected[held.learner] = UNKNOWN_BASE
                continue
            norm = _norm(gradients)
            if math.isfinite(norm):
                candidates.append(_Candidate(held, gradients, norm))
            else:  # finite values whose difference is not
                rejected[held.learner] = NON_FINITE
        return candidates, rejected

    def _gradients(
        self, fragment: int, held: HeldContribution, parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        """v of every parameter; None: a delta whose base is not kept."""
        current = {name: parameter.detach() for name, parameter in parameters.items()}
        base = self._base(fragment, held.message.base, current)
        if held.message.payload.kind == "delta":
            if base is None:
                return None
            return {n: from_delta(current[n], base[n], held.payload[n]) for n in sorted(current)}
        return {n: self._move(current[n], base, n, held.payload[n]) for n in sorted(current)}

    @staticmethod
    def _move(current: Tensor, base: dict[str, Tensor] | None, name: str, local: Tensor) -> Tensor:
        # values travel in the learner's own dtype, tensor by tensor: models mix them
        if local.dtype.itemsize == 2 and base is not None:
            return reanchored(current, base[name], local)
        # a 16-bit learner whose base is gone has moved far more than the rounding of its base
        return outer_gradient(current, local)

    def _base(
        self, fragment: int, version: Version, current: dict[str, Tensor]
    ) -> dict[str, Tensor] | None:
        if version == self.version(fragment):
            return current  # the same objects: v is then bitwise the learner's own difference
        for kept, encoded in self._versions[fragment]:
            if kept == version:
                return encoded.tensors(self._shapes)
        return None

    def _guard(self, candidates: list[_Candidate], rejected: dict[str, str]) -> None:
        if self._max_norm_ratio is None or len(candidates) < GUARD_LEAST:
            return
        bound = self._max_norm_ratio * statistics.median(one.norm for one in candidates)
        for one in [one for one in candidates if one.norm > bound]:
            rejected[one.held.learner] = NORM
            candidates.remove(one)

    def _put_gradient(
        self, candidates: list[_Candidate], parameters: Mapping[str, Tensor]
    ) -> tuple[float, float | None, float]:
        """Set the merged gradient; returns agreement, cosine and ‖Δ‖."""
        merged, agreement, cosine = merge_fragment(
            [one.gradients for one in candidates],
            [one.held.weight for one in candidates],
            self._rule,
            self.theta.layout.averaged,
        )
        for name, parameter in parameters.items():
            parameter.grad = merged[name].to(parameter.dtype)
        outer_norm = candidates[0].norm if len(candidates) == 1 else _norm(merged)
        return agreement, cosine, outer_norm

    def _reanchor(
        self,
        candidates: list[_Candidate],
        parameters: Mapping[str, Tensor],
        optimizer: OuterOptimizer,
    ) -> None:
        weights = [one.held.weight for one in candidates]
        for name, parameter in parameters.items():
            values = [self._values(one, name, parameter.detach()) for one in candidates]
            with torch.no_grad():
                parameter.copy_(weighted_average(values, weights))
            optimizer.state.pop(parameter, None)  # an absent buffer is one of zeros

    @staticmethod
    def _values(candidate: _Candidate, name: str, current: Tensor) -> Tensor:
        if candidate.held.message.payload.kind == "values":
            return candidate.held.payload[name]
        return current - candidate.gradients[name]

    @staticmethod
    def _merge_buffers(candidates: list[_Candidate], buffers: Mapping[str, Tensor]) -> None:
        merged = merge_buffers(
            [
                {name: one.held.payload[name] for name in buffers if name in one.held.payload}
                for one in candidates
            ],
            [one.held.weight for one in candidates],
            running_pairs(buffers),
        )
        for name, value in merged.items():
            buffers[name].copy_(value)

    def _staleness(self, job: Merge, held: HeldContribution) -> int:
        """Merges between the base and this one; merges undone by a restore do not count."""
        return max(0, self.version(job.fragment)[1] - held.message.base[1])

    def _encode(self, fragment: int) -> Encoded:
        return encode_values(
            {n: self.theta.by_name[n] for n in self.theta.layout.fragments[fragment]}
        )

    def _publish(self, job: Merge) -> None:
        kept = self._versions[job.fragment]
        kept.append((job.version, self._encode(job.fragment)))
        while len(kept) > (KEPT_VERSIONS if self._keep_versions() else 1):
            kept.popleft()


def _norm(tensors: Mapping[str, Tensor]) -> float:
    """Norm over all tensors together, in float64, in name order."""
    return math.sqrt(sum(squared_norm(tensors[name]) for name in sorted(tensors)))
