"""The syncer as a LightningModule: parameters are Θ, batches are merge jobs, steps are merges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from dd_lightning.algorithm import build_outer_optimizer
from dd_lightning.crash_points import reach
from dd_lightning.protocol.actions import Merge, WriteCheckpoint
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.layout import Layout
from dd_lightning.protocol.messages import Version
from dd_lightning.syncer.merger import Merged, Merger
from dd_lightning.syncer.stream import Job
from dd_lightning.syncer.theta import Theta

STATE_KEY = "decoupled_diloco_syncer"


class SyncerModule(LightningModule):
    """Θ under an outer optimizer; `Trainer.fit(module, RoundStream)` is the syncer's loop.

    A Merge job puts the merged outer gradient into `.grad` of one fragment's parameters and steps
    the optimizer; `global_step` counts merges. `state_dict` has the learners' own canonical names,
    so a learner's module loads a checkpoint of this one.

    Args:
        layout: of the run.
        values: Θ by canonical name, buffers included.
        config: the run's; its `algorithm.outer` is the optimizer.
        versions: of each fragment of `values`.
        deliver: called (in the training thread) with each merge that was done.
        keep_versions: whether contributions may be anchored at older versions (see `Merger`).
    """

    def __init__(
        self,
        layout: Layout,
        values: Mapping[str, Tensor],
        config: SyncerConfig,
        versions: Sequence[Version],
        deliver: Callable[[Merged], None] = lambda merged: None,
        keep_versions: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        theta = Theta(layout, values)
        self.theta = theta.root
        self.merger = Merger(theta, config.algorithm, versions, keep_versions)
        self._deliver = deliver
        self._core_state: dict[str, Any] | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The outer optimizer over all of Θ; its state is per parameter, hence per fragment."""
        return build_outer_optimizer(self.theta.parameters(), self.config.algorithm.outer)

    def training_step(self, job: Job, batch_idx: int = 0) -> None:
        """Do one job. A WriteCheckpoint is written by `CheckpointWriter` after this returns."""
        self._core_state = job.state if isinstance(job, WriteCheckpoint) else None
        if isinstance(job, Merge):
            reach("merge.begun")
            merged = self.merger.merge(job, self.optimizers())  # type: ignore[arg-type]
            self._log_merge(merged)
            reach("merge.done")
            self._deliver(merged)

    def _log_merge(self, merged: Merged) -> None:
        job, result = merged.job, merged.result
        rejected = dict(result.rejected)
        values = {
            "fragment": job.fragment,
            "round": job.round,
            "contributors": sum(one.learner not in rejected for one in job.contributions),
            "outer_norm": result.outer_norm,
            "seconds": result.seconds,
            "staleness": max((gap for _, gap in result.staleness), default=0),
        }
        if result.agreement is not None:
            values["agreement"] = result.agreement
        self.log_dict({f"merge/{k}": float(v) for k, v in values.items()}, batch_size=1)

    def transfer_batch_to_device(self, batch: Job, device: Any, dataloader_idx: int) -> Job:
        """Jobs stay as they are: the payloads are on the CPU, and Θ too."""
        return batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what a restart needs, as plain values, to a checkpoint that the core asked for."""
        if self._core_state is None:  # a user's own callback saves: Θ only, nothing to resume from
            return
        layout = self.merger.theta.layout
        num = range(layout.num_fragments)
        checkpoint[STATE_KEY] = {
            "core": self._core_state,
            "config": self.config.to_dict(),
            "run_id": self.config.run_id,
            "layout": layout_to_plain(layout),
            "versions": [list(self.merger.version(index)) for index in num],
        }

    # Θ's own names, without a prefix

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Θ by canonical name."""
        return self.theta.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Θ from canonical names."""
        return self.theta.load_state_dict(state_dict, *args, **kwargs)


def layout_to_plain(layout: Layout) -> dict[str, Any]:
    """Plain values that `layout_from_plain` takes back, and `torch.load(weights_only=True)`."""
    return {
        "tensors": msgspec.to_builtins(layout.tensors),
        "fragments": [list(names) for names in layout.fragments],
        "averaged": sorted(layout.averaged),
        "fingerprint": layout.fingerprint,
    }


def layout_from_plain(plain: Mapping[str, Any]) -> Layout:
    """The layout of a checkpoint.

    Raises:
        ValueError: it is none.
    """
    return msgspec.convert(plain, Layout)
