"""Shared by the tasks: shards with a manifest, a build-once cache, a resumable shard stream, the
datamodule over them."""

from .cache import build_once
from .datamodule import ShardDataModule
from .npm import NpmPackage
from .origin import Origin
from .shards import Manifest, Shard, read_manifest, read_shard, write_manifest, write_shards
from .stream import ShardStream, StreamPlan

__all__ = [
    "Manifest",
    "NpmPackage",
    "Origin",
    "Shard",
    "ShardDataModule",
    "ShardStream",
    "StreamPlan",
    "build_once",
    "read_manifest",
    "read_shard",
    "write_manifest",
    "write_shards",
]
