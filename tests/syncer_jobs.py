"""Hand-made layouts, contributions and Merge jobs for the syncer's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dd_lightning.algorithm import NoCodec, dtype_name
from dd_lightning.protocol.actions import HeldContribution, Merge
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.layout import Layout, build_layout
from dd_lightning.protocol.messages import Contribution, Payload, TensorInfo, TensorPart
from dd_lightning.syncer.module import SyncerModule
from dd_lightning.syncer.payload import checksum

TENSORS = (
    TensorInfo("net.0.weight", (8, 6)),
    TensorInfo("net.0.bias", (8,)),
    TensorInfo("half.weight", (5, 4)),
    TensorInfo("net.embed.weight", (7, 3), kind="embedding"),
    TensorInfo("norm.running_mean", (3,), kind="buffer", module="net.0.weight"),
    TensorInfo("norm.running_var", (3,), kind="buffer", module="net.0.weight"),
)


def config_of(**algorithm: Any) -> SyncerConfig:
    """P = 2, plain averaging of values (lr 1, momentum 0) unless told otherwise."""
    settings = {"fragments": 2, "sync_every": 4, "outer": {"lr": 1.0, "momentum": 0.0}}
    return SyncerConfig.load({"algorithm": settings | algorithm, "learners": 4, "run_id": "r"})


def values_of(seed: int, tensors: tuple[TensorInfo, ...] = TENSORS) -> dict[str, Tensor]:
    """Random float32 values by name; variances positive."""
    generator = torch.Generator().manual_seed(seed)
    values = {t.name: torch.randn(t.shape, generator=generator) for t in tensors}
    return {n: v.abs() + 0.1 if n.endswith("running_var") else v for n, v in values.items()}


def layout_of(config: SyncerConfig) -> Layout:
    """The layout of `TENSORS`."""
    return build_layout(TENSORS, config.algorithm)


def module_of(config: SyncerConfig, seed: int = 0, **options: Any) -> SyncerModule:
    """A module whose Θ is `values_of(seed)`, every fragment at version (1, 0)."""
    layout = layout_of(config)
    versions = [(1, 0)] * layout.num_fragments
    return SyncerModule(layout, values_of(seed), config, versions, **options)


def encode(tensors: dict[str, Tensor], kind: str = "values", codec: Any = None):
    """(header, bytes) as a learner would make them; buffers and values go raw."""
    codec = NoCodec() if codec is None else codec
    chunks = [
        bytes((NoCodec() if "running" in name else codec).encode(tensor))
        for name, tensor in sorted(tensors.items())
    ]
    data = b"".join(chunks)
    parts = tuple(
        TensorPart(n, dtype_name(t.dtype), 0, t.numel()) for n, t in sorted(tensors.items())
    )
    header = Payload(
        codec=codec.name, kind=kind, parts=parts, num_bytes=len(data), digest=checksum(data)
    )
    return header, memoryview(data)


def contribution(
    learner: str,
    fragment: int,
    payload: dict[str, Tensor],
    *,
    weight: float = 1.0,
    base: tuple[int, int] = (1, 0),
    kind: str = "values",
    dtype: str = "float32",
) -> HeldContribution:
    """A held contribution whose payload is already decoded."""
    message = Contribution(
        generation=1,
        epoch=1,
        round=1,
        fragment=fragment,
        step=4,
        steps=4,
        tokens=40,
        odometer=40,
        base=base,
        payload=encode(payload, kind)[0],
        fingerprint="",
    )
    return HeldContribution(
        learner=learner,
        generation=1,
        incarnation=f"life of {learner}",
        message=message,
        payload=payload,
        dtype=dtype,
        arrived_s=0.0,
        weight=weight,
    )


def job(
    fragment: int, version: tuple[int, int], *held: HeldContribution, reanchor: bool = False
) -> Merge:
    """A Merge job that makes `version`."""
    return Merge(1, version[1], fragment, version, held, reanchor)
