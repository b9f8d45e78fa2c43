"""Shared by the tasks: shards with a manifest, a build-once cache, a resumable shard stream."""

from .cache import build_once
from .shards import Manifest, Shard, read_manifest, read_shard, write_manifest, write_shards
from .stream import ShardStream, StreamPlan

__all__ = [
    "Manifest",
    "Shard",
    "ShardStream",
    "StreamPlan",
    "build_once",
    "read_manifest",
    "read_shard",
    "write_manifest",
    "write_shards",
]
