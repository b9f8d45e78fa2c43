"""Copies of state beside a step: whole, of one moment, never ahead of the next step."""

from __future__ import annotations

import threading

import pytest
import torch

import dd_lightning.learner.state_copy as state_copy
from dd_lightning.learner.state_copy import BackgroundCopy, StateCopies

pytestmark = pytest.mark.unit


def tensors(count: int = 50) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((64,), float(i)) for i in range(count)}


def test_copies_are_equal_and_share_nothing() -> None:
    given = tensors() | {"scalar": torch.tensor(3), "parameter": torch.nn.Parameter(torch.ones(2))}
    copies = BackgroundCopy(given).start().finish()
    assert list(sorted(copies)) == list(sorted(given))
    for name, tensor in given.items():
        assert torch.equal(copies[name], tensor) and not copies[name].requires_grad
        assert copies[name].data_ptr() != tensor.data_ptr()


def test_nothing_to_copy_is_done_at_once() -> None:
    assert BackgroundCopy({}).start().finish() == {}


class Slow:
    """Stands for a tensor whose copy takes until `go`."""

    is_cuda, device = False, torch.device("cpu")

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def detach(self) -> Slow:
        return self

    def to(self, *_: object, **__: object) -> torch.Tensor:
        self.begun.set()
        assert self.go.wait(30)
        return torch.ones(1)


def test_finish_takes_part_and_waits_for_the_tensor_in_the_threads_hands() -> None:
    slow = Slow()
    copy = BackgroundCopy({"slow": slow, **tensors()}).start()
    assert slow.begun.wait(30)
    found: list[dict] = []
    finisher = threading.Thread(target=lambda: found.append(copy.finish()))
    finisher.start()
    while len(copy._copies) < 50:  # all but the slow one are copied by who waits
        pass
    assert not copy.done and finisher.is_alive()
    slow.go.set()
    finisher.join(30)
    assert copy.done and len(found[0]) == 51 and copy.finish() is found[0]


def test_a_stuck_copy_is_given_up_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "LONGEST_S", 0.05)
    slow = Slow()
    copy = BackgroundCopy({"slow": slow}).start()
    assert slow.begun.wait(30)
    with pytest.raises(TimeoutError, match="1 tensors to go"):
        copy.finish()
    slow.go.set()


class Broken(Slow):
    def to(self, *_: object, **__: object) -> torch.Tensor:
        raise OSError("gone")


def test_an_error_in_the_thread_is_raised_where_the_copies_are_asked_for() -> None:
    copies = StateCopies()
    copies.begin({"broken": Broken()})
    with pytest.raises(RuntimeError, match="gone"):
        copies.settle()
    copies.settle()  # said once
