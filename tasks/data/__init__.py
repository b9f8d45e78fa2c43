"""Shared by the tasks: shards with a manifest, a build-once cache, a resumable shard stream, the
datamodule over them."""

from .cache import build_once
from .datamodule import ShardDataModule
from .groups import Groups, in_shard_order, number_groups
from .npm import NpmPackage
from .origin import Origin
from .ready import ReadyShards, check_settings, warn_without_effect
from .shards import Manifest, Shard, read_manifest, read_shard, write_manifest, write_shards
from .split import Split
from .stream import ShardStream, StreamPlan

__all__ = [
    "Groups",
    "Manifest",
    "NpmPackage",
    "Origin",
    "ReadyShards",
    "Shard",
    "ShardDataModule",
    "ShardStream",
    "Split",
    "StreamPlan",
    "build_once",
    "check_settings",
    "in_shard_order",
    "number_groups",
    "read_manifest",
    "read_shard",
    "warn_without_effect",
    "write_manifest",
    "write_shards",
]
