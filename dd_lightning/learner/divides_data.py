"""Our strategy over those whose sampler Lightning replaces by its `DistributedSampler`."""

from __future__ import annotations

from typing import Any

from dd_lightning.learner.sampler import sampler_kwargs
from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy


class DividesData(DecoupledDiLoCoStrategy):
    """Learners see other parts, or other orders, of the data, by `data`."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        inner = super().distributed_sampler_kwargs  # type: ignore[misc] (Lightning's own class)
        session = self._session
        welcome = None if session is None else session.welcome
        if session is None or welcome is None or session.is_alone:
            return inner
        return sampler_kwargs(
            inner,
            self.data,
            training=self._trainer.training,
            slot=welcome.data_slot,
            slots=welcome.num_data_slots,
            seed=session.config.seed,
        )
