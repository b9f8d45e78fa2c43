"""Prepare a task's data before a run: `python scripts/prepare_data.py task.data.source=sotu`.

Done already, it only checks every shard against its checksum. Prints the folder as JSON.
"""

import json
import os
import sys

import hydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from dd_lightning.tasks.data import read_manifest


def prepare_data(task: DictConfig) -> dict[str, object]:
    """Build and verify the data of `cfg.task`; what to tell about it."""
    datamodule = instantiate(task.data, _convert_="all")
    datamodule.prepare_data()
    datamodule.fetch_shards()
    folder = datamodule.folder
    manifest = read_manifest(folder, verify=True)
    shards = manifest.train + manifest.validation
    return {
        "folder": str(folder),
        "train_samples": sum(shard.samples for shard in manifest.train),
        "validation_samples": sum(shard.samples for shard in manifest.validation),
        "shards": len(shards),
        "bytes": sum(shard.bytes for shard in shards),
        "licence": manifest.info["licence"],
        "attribution": manifest.info["attribution"],
    }


@hydra.main(config_path="pkg://dd_lightning.conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    try:
        print(json.dumps(prepare_data(config.task), indent=1))
    except (ValueError, InstantiationException) as error:
        reason = error.__cause__ if isinstance(error, InstantiationException) else error
        if not isinstance(reason, ValueError) or os.environ.get("HYDRA_FULL_ERROR"):
            raise
        # a setting that cannot work: one line, no traceback
        print(f"prepare_data: {' '.join(str(reason).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
