"""The global random number generators of one learner, put in place when it is its turn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(slots=True)
class RandomState:
    """States of Python's, numpy's and torch's global generators.

    Learners of a simulated run share a process; each must draw as if it were alone in one.
    """

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def current(cls) -> RandomState:
        """As they are now."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        """Put them in place."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
