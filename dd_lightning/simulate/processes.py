"""Processes of a simulated run, as the launcher's `Family` and the injector handle real ones."""

from __future__ import annotations

import signal
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dd_lightning.launch.processes import Child


class VirtualProcess(Child):
    """One process life. `pid` is a number that only its role's lives are told apart by."""

    def __init__(self, name: str, life: int) -> None:
        self.name, self.pid = name, life
        self.log = Path(f"what {name} raised")  # it has no log: messages show its error instead

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What ended it, if that was an error."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """As a process has it; None while it runs."""

    @abstractmethod
    def kill(self) -> None:
        """End it where it stands; without effect once it has ended."""

    @abstractmethod
    def terminate(self) -> None:
        """Tell it to end in order."""

    def renice(self) -> bool:
        """It was never nice."""
        return True

    def said(self, key: str) -> dict[str, Any] | None:
        """Nothing: it has no standard output."""
        del key
        return None

    def tail(self, lines: int = 15) -> str:
        """The last lines of its error."""
        if self.error is None:
            return "nothing"
        text = "".join(traceback.format_exception(self.error))
        return "\n".join(text.splitlines()[-lines:])


class Pausable(VirtualProcess):
    """One that can be stopped for a while."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Stop it for so long."""

    @abstractmethod
    def resume(self) -> None:
        """Let it go on."""


class VirtualChildren:
    """The run's processes by role, as `chaos.injector` asks for them.

    Args:
        find: the running process of "syncer" or "learner 0" that has joined, else None.
        network: takes the commands that a real proxy takes.
    """

    def __init__(
        self,
        find: Callable[[str], VirtualProcess | None],
        network: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._find, self._network = find, network
        self._paused: list[Pausable] = []

    def pid(self, role: str) -> int | None:
        """None while it is not there."""
        found = self._find(role)
        return None if found is None or found.exit_code() is not None else found.pid

    def signal(self, role: str, number: int) -> None:
        """SIGKILL; the plans know no other."""
        assert number == signal.SIGKILL, f"no plan sends signal {number}"
        if (found := self._find(role)) is not None:
            found.kill()

    def pause(self, role: str, seconds: float) -> None:
        """Stop it for so long."""
        found = self._find(role)
        assert isinstance(found, Pausable), f"a plan pauses learners only, not {role}"
        self._paused.append(found)
        found.pause(seconds)

    def resume(self) -> None:
        """Whoever is paused goes on."""
        for process in self._paused:
            process.resume()
        self._paused.clear()

    def proxy(self, command: Mapping[str, Any]) -> bool:
        """A fault of a path begins."""
        self._network(command)
        return True
