"""The network of a simulated run: who is connected to whom, over which links, with which faults.

The links are `network/link.py`'s, driven by the proxy's pump on virtual time. `control` takes the
proxy's commands (`network/control.py`), so that one fault plan serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any, Protocol

from dd_lightning.learner.dialing import Bounds
from dd_lightning.network.control import PathFaults, unshaped
from dd_lightning.network.lane import chunk_bytes
from dd_lightning.network.link import Direction, LinkModel, Path
from dd_lightning.network.profiles import WanProfile
from dd_lightning.network.pump import Pump
from dd_lightning.simulate.flows import InstantFlow, PumpClock, ShapedFlow
from dd_lightning.simulate.handshake import ASK_ROUND_TRIPS, CHANNEL_ROUND_TRIPS, Handshake
from dd_lightning.simulate.sessions import ROLES, Session, SyncerEnd
from dd_lightning.simulate.virtual_time import VirtualTime
from dd_lightning.transport.frames import CONTROL

WAYS: tuple[Direction, ...] = ("up", "down")


class Listener(SyncerEnd, Protocol):
    """A syncer's channel."""

    def accept(self, session: Session) -> None:
        """A learner has connected."""


class VirtualNetwork:
    """Connects learners with whatever syncer listens (`syncer`, None while it is away).

    Args:
        controlled: names, in order of index, of learners whose links can be ordered to fail; a
            profile that shapes nothing is then a link as fast as loopback, as with the proxy.
    """

    def __init__(
        self, time: VirtualTime, profile: WanProfile, seed: int, controlled: Sequence[str] = ()
    ) -> None:
        if controlled and not profile.needs_proxy:
            profile = unshaped(profile)
        self.time = time
        self.syncer: Listener | None = None
        self._profile, self._seed = profile, seed
        self._model = LinkModel(profile, seed) if profile.needs_proxy else None
        self._pump = Pump(self._model, PumpClock(time), tick_s=0.0) if self._model else None
        self._names = count(1)
        self._faults = {
            name: self._path_faults(index, name) for index, name in enumerate(controlled)
        }
        self._controlled = tuple(controlled)

    def _path_faults(self, index: int, name: str) -> PathFaults:
        region = self._profile.region_of(index)
        rng = Random(f"{self._seed}:faults:{name}")
        return PathFaults(self._profile.link(region), region, 0.0, rng)

    # ------------------------------------------------------------------ faults

    def control(self, command: Mapping[str, Any]) -> None:
        """Begin a fault of the link of `command["learner"]` (see `network/control.py`).

        Raises:
            ValueError: the learner's link is not controlled, or the command is none.
        """
        learner = command.get("learner")
        if learner not in self._faults:
            raise ValueError(
                f"learner {learner!r} has no controlled link here; {list(self._faults)} have"
            )
        self._faults[learner].apply(command, self.time.now)

    def _faults_of(self, index: int) -> PathFaults | None:
        return self._faults[self._controlled[index]] if index < len(self._controlled) else None

    # ------------------------------------------------------------------ connections

    def dial(
        self,
        learner: int,
        to_learner: Callable[[Any], None],
        done: Callable[[Session | OSError], None],
        bounds: Bounds,
        ask_s: float | None = None,
        patience_s: Callable[[], float] | None = None,
    ) -> None:
        """Try to connect; `done` gets the session, or what the real dial raises.

        Args:
            learner: its index.
            bounds: of the channel's handshake.
            ask_s: bound on asking the rendezvous first; None: the learner knows the address.
            patience_s: how long the channel may be silent; None: for ever.
        """
        if self._model is None:
            self.time.at(self.time.now, lambda: self._connect_at_once(learner, to_learner, done))
            return

        def asked(error: OSError | None) -> None:
            if error is not None:
                done(error)
            else:
                self._dial_channel(learner, to_learner, done, bounds, patience_s)

        if ask_s is None:
            asked(None)
        else:
            self._handshake(
                self._paths(learner), ASK_ROUND_TRIPS, Bounds(ask_s, ask_s), asked
            ).begin()

    def _connect_at_once(
        self,
        learner: int,
        to_learner: Callable[[Any], None],
        done: Callable[[Session | OSError], None],
    ) -> None:
        if self.syncer is None:
            done(ConnectionRefusedError("nobody listens"))
            return
        session = Session(self._name(), learner, self.time, self.syncer, to_learner)
        session.flows = {(way, role): InstantFlow(self.time) for way in WAYS for role in ROLES}
        self.syncer.accept(session)
        done(session)

    def _dial_channel(
        self,
        learner: int,
        to_learner: Callable[[Any], None],
        done: Callable[[Session | OSError], None],
        bounds: Bounds,
        patience_s: Callable[[], float] | None,
    ) -> None:
        began_s, paths = self.time.now, {role: self._paths(learner) for role in ROLES}

        def dialled(error: OSError | None) -> None:
            if error is None and self.syncer is None:
                error = ConnectionResetError("the syncer is gone")
            if error is not None:
                done(error)
                return
            assert self.syncer is not None  # just asked
            session = self._session(learner, self.syncer, to_learner, patience_s, paths)
            session.handshake_s = self.time.now - began_s
            self.syncer.accept(session)
            session.begin()
            done(session)

        # both connections are made at the same time and take equally long
        self._handshake(paths[CONTROL], CHANNEL_ROUND_TRIPS, bounds, dialled).begin()

    def _handshake(
        self,
        paths: dict[Direction, Path],
        round_trips: int,
        bounds: Bounds,
        done: Callable[[OSError | None], None],
    ) -> Handshake:
        return Handshake(
            self.time, paths, lambda: self.syncer is not None, round_trips, bounds, done
        )

    def _paths(self, learner: int) -> dict[Direction, Path]:
        """A new TCP connection's."""
        assert self._model is not None  # else nothing is shaped
        region, faults = self._profile.region_of(learner), self._faults_of(learner)
        return {way: self._model.path(region, way, faults) for way in WAYS}

    def _session(
        self,
        learner: int,
        syncer: SyncerEnd,
        to_learner: Callable[[Any], None],
        patience_s: Callable[[], float] | None,
        paths: dict[bytes, dict[Direction, Path]],
    ) -> Session:
        assert self._pump is not None  # else nothing is shaped
        region = self._profile.region_of(learner)
        link, faults = self._profile.link(region), self._faults_of(learner)
        may_fall_silent = faults is not None or bool(self._profile.outages_of(region))
        session = Session(
            self._name(),
            learner,
            self.time,
            syncer,
            to_learner,
            one_way_s=link.rtt_ms / 2e3,
            patience_s=patience_s if may_fall_silent else None,
            faults=faults,
        )
        session.flows = {
            (way, role): ShapedFlow(
                self.time,
                self._pump,
                self._pump.lane(region, way),
                paths[role][way],
                chunk_bytes(link, way),
                lambda way=way, role=role: session.heard(way, role),
            )
            for way in WAYS
            for role in ROLES
        }
        return session

    def _name(self) -> str:
        return f"{next(self._names):032x}"
