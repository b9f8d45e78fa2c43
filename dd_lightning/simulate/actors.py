"""Threads that take turns: at any moment one of them runs, or the scheduler does.

An actor runs ordinary blocking code (a `Trainer.fit`); where that code would wait for time to pass
or for a message, it parks and the scheduler plays the next event. An actor that is killed drops
what it holds where it stands, as a killed process does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn

from dd_lightning.simulate.random_state import RandomState
from dd_lightning.simulate.virtual_time import BOUNDARIES_LAST, VirtualTime

ALIVE_CHECK_S = 5.0  # of real time: how often the scheduler looks whether an actor's thread lives


class Killed(BaseException):
    """Raised in an actor that was killed, where it was parked."""


class Actor:
    """One thread with turns. `error` is what its function raised.

    Args:
        run: what it does, in its own thread.
        order: when it runs among what happens at one instant (`virtual_time`).
    """

    def __init__(
        self, name: str, run: Callable[[], None], time: VirtualTime, order: int = BOUNDARIES_LAST
    ) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.ended = False
        self._run, self._time, self._order = run, time, order
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._random = RandomState.current()
        self._killed = self._frozen = self._missed_turn = False
        self._frozen_at_s = self._frozen_s = 0.0  # since when; how long in all
        self._waits_for: object | None = None  # token of the wake-up that counts
        self._thread = threading.Thread(target=self._main, name=f"simulate {name}", daemon=True)

    # ------------------------------------------------------------------ scheduler

    def start(self) -> None:
        """Its first turn comes now."""
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Let it go on at this instant, if it is parked."""
        token = self._waits_for = object()
        self._time.at(self._time.now, lambda: self._turn(token), self._order)

    def go(self) -> None:
        """Give it the turn now, outside of any schedule; returns when it parks or ends."""
        if self._thread.ident is None:
            self._thread.start()
        self._waits_for = None
        self._switch()

    def kill(self) -> None:
        """End it where it stands; returns once its thread has left its code."""
        if self.ended or self._thread.ident is None:
            self.ended = True
            return
        self._killed = True
        self._waits_for = None
        self._switch()

    def freeze(self) -> None:
        """No more turns until `thaw`, as for a stopped process."""
        if not self._frozen:
            self._frozen, self._frozen_at_s = True, self._time.now

    def thaw(self) -> None:
        """A turn that was missed comes now."""
        if not self._frozen:
            return
        self._frozen = False
        self._frozen_s += self._time.now - self._frozen_at_s
        if self._missed_turn:
            self._missed_turn = False
            self.wake()

    def _turn(self, token: object) -> None:
        if token is not self._waits_for or self.ended:
            return
        if self._frozen:
            self._missed_turn = True
            return
        self._waits_for = None
        self._switch()

    def _switch(self) -> None:
        """Give it the turn, and take it back when it parks or ends."""
        ours = RandomState.current()
        self._random.restore()
        self._mine.release()
        while not self._theirs.acquire(timeout=ALIVE_CHECK_S):
            if not self._thread.is_alive():
                raise RuntimeError(f"the thread of {self.name} is gone without a word")
        self._random = RandomState.current()
        ours.restore()

    # ------------------------------------------------------------------ its own thread

    def park(self, until: float | None = None) -> None:
        """Give the turn back until `until`, or until `wake`; None: until `wake`.

        Raises:
            Killed: it was killed meanwhile.
        """
        assert self.is_current, f"{self.name} parks in another's thread"
        if self._killed:
            raise Killed(self.name)
        token = self._waits_for = object()
        if until is not None:
            self._time.at(until, lambda: self._turn(token), self._order)
        self._theirs.release()
        self._mine.acquire()
        if self._killed:
            raise Killed(self.name)

    def work(self, seconds: float) -> None:
        """Be busy for so long; while it is frozen nothing gets done.

        Raises:
            Killed: as `park`.
        """
        lost_s = 1.0
        while seconds > 0 and lost_s > 0:
            began_s, frozen_s = self._time.now, self._frozen_s
            self.park(began_s + seconds)
            lost_s = self._frozen_s - frozen_s
            seconds -= self._time.now - began_s - lost_s

    def die(self) -> NoReturn:
        """End here and now, by its own hand."""
        self._killed = True
        raise Killed(self.name)

    @property
    def is_current(self) -> bool:
        """Whether this is its own thread."""
        return threading.current_thread() is self._thread

    def _main(self) -> None:
        self._mine.acquire()
        try:
            if not self._killed:
                self._run()
        except Killed:
            pass  # what it held is gone with it
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._theirs.release()
