"""Copies of a learner's state to host memory while its next forward and backward run.

Parameters and optimizer state change only in the optimizer's step and in the applies at the
boundary after it. So a copy that begins between two steps may go on in a thread of its own until
just before the next step, where the training thread does what is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

LONGEST_S = 60.0  # bound on the wait for the one tensor that another thread is copying


class BackgroundCopy:
    """Copies `tensors` in a thread; whoever calls `finish` takes part, so nobody waits idly.

    The tensors must not change before `finish` has returned. Buffers that forward changes, RNG
    states and counters are not for this: copy them at once.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._todo = deque((name, tensor.detach()) for name, tensor in tensors.items())
        self._copies: dict[str, Tensor] = {}
        self._left = len(self._todo)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Event] = {}  # what the copies come after
        self._thread = threading.Thread(target=self._run, name="dd-lightning-copy", daemon=True)

    def start(self) -> BackgroundCopy:
        """Begin; call it in the thread that changed the tensors last."""
        for device in {tensor.device for _, tensor in self._todo if tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._streams[device] = event
        self._thread.start()
        return self

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        with self._changed:
            return self._left == 0

    def finish(self) -> dict[str, Tensor]:
        """The copies by name, on the CPU, in the order given; copies here what is not begun yet.

        Raises:
            TimeoutError: the thread was stuck in one tensor for `LONGEST_S`.
            RuntimeError: a copy failed, in whichever thread.
        """
        self._work()
        with self._changed:
            if not self._changed.wait_for(lambda: self._left == 0 or self._error, LONGEST_S):
                raise TimeoutError(
                    f"a copy of this learner's state has not ended within {LONGEST_S:g} s, "
                    f"{self._left} tensors to go"
                )
        if self._error is not None:
            raise RuntimeError(f"a copy of this learner's state failed: {self._error!r}")
        return self._copies

    def _run(self) -> None:
        streams = {device: torch.cuda.Stream(device) for device in self._streams}
        for device, stream in streams.items():  # the training stream goes on beside them
            stream.wait_event(self._streams[device])
        self._work(streams)

    def _work(self, streams: Mapping[torch.device, torch.cuda.Stream] | None = None) -> None:
        while self._error is None:
            try:
                name, tensor = self._todo.popleft()
            except IndexError:
                return
            try:
                with torch.no_grad(), torch.cuda.stream((streams or {}).get(tensor.device)):
                    copy = tensor.to("cpu", copy=True)
            except BaseException as error:  # told to whoever asks for the copies
                self._error, copy = error, tensor
            with self._changed:
                self._copies[name] = copy
                self._left -= 1
                self._changed.notify_all()


class StateCopies:
    """The copies that must be over before the state changes again; of the training thread."""

    def __init__(self) -> None:
        self._under_way: list[BackgroundCopy] = []

    def begin(self, tensors: Mapping[str, Tensor]) -> BackgroundCopy:
        """Start one."""
        copy = BackgroundCopy(tensors).start()
        self._under_way.append(copy)
        return copy

    def settle(self) -> None:
        """Just before a step or an apply: what is under way is finished. Raises as `finish`."""
        under_way, self._under_way = self._under_way, []
        for copy in under_way:
            copy.finish()
