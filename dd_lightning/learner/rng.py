"""The states of the random number generators, as plain values and tensors.

Only a learner's own checkpoint brings them back. They are never taken from another learner: two
with one state would draw the same dropout masks and the same augmentations.
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_states() -> dict[str, Any]:
    """Of python, numpy, torch and, where it is in use, every CUDA device; `torch.load` takes them
    with weights_only=True."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def packed(states: Mapping[str, Any]) -> bytes:
    """To be sent to another rank."""
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def unpacked(data: bytes | bytearray) -> dict[str, Any]:
    """What `packed` made; holds plain values and tensors only."""
    return torch.load(io.BytesIO(data), weights_only=True)


def restore_rng(states: Mapping[str, Any]) -> None:
    """Continue where `states` were taken. With other CUDA devices than then, those start anew."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    stored = [state.cpu() for state in states.get("cuda", [])]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if stored and len(stored) == devices:
        torch.cuda.set_rng_state_all(stored)
    elif stored:
        warnings.warn(
            f"the checkpoint has random states of {len(stored)} CUDA devices, this process sees "
            f"{devices}: theirs are not restored, so masks differ from an undisturbed run's.",
            stacklevel=2,
        )
