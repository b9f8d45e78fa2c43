"""Both ends of the virtual channel without learners or a syncer: what was sent when, what came."""

from __future__ import annotations

from typing import Any

from dd_lightning.learner.dialing import Bounds
from dd_lightning.network.profiles import WanProfile
from dd_lightning.protocol.messages import Progress
from dd_lightning.simulate.channels import VirtualSyncerChannel
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.sessions import Session
from dd_lightning.simulate.virtual_time import VirtualTime
from dd_lightning.transport.frames import Arrival
from tests.transport_samples import contribution

PATIENT = Bounds(1000.0, 1000.0)
SILENCE_S = 2.0
PROGRESS = Progress(generation=1, step=1, odometer=2, losses=())


def profile(outages: tuple[dict[str, Any], ...] = (), **link: Any) -> WanProfile:
    """Learner 0 in region a, learner 1 in c, learner 2 in a; the syncer in b."""
    values = {"rtt_ms": 80, "up_mbit_s": 80, "down_mbit_s": 80, **link}
    return WanProfile.from_config(
        {"name": "test", "regions": ["a", "c", "b"], "syncer_region": "b", "outages": outages}
        | {"links": {"a-b": values, "c-b": values}, "learner_regions": ["a", "c", "a"]}
    )


class _Noting(VirtualSyncerChannel):
    def _tell(self, event: Any) -> None:
        self.seen.append((self._time.now, event))


class Links:
    """A network with a listening syncer.

    `at_syncer` and `at_learner[index]` hold (time, event) of all that has come.
    """

    def __init__(self, wan: WanProfile, seed: int = 0, controlled: tuple[str, ...] = ()) -> None:
        self.time = VirtualTime()
        self.network = VirtualNetwork(self.time, wan, seed, controlled)
        self.syncer = _Noting(self.network)
        self.at_syncer: list[tuple[float, Any]] = []
        self.syncer.seen = self.at_syncer
        self.at_learner: dict[int, list[tuple[float, Any]]] = {}

    def dial(self, learner: int, bounds: Bounds = PATIENT) -> Session | OSError:
        """One attempt, to its end."""
        ended: list[Session | OSError] = []
        events = self.at_learner.setdefault(learner, [])
        self.network.dial(
            learner,
            lambda event: events.append((self.time.now, event)),
            ended.append,
            bounds,
            patience_s=lambda: SILENCE_S,
        )
        self.time.run(lambda: bool(ended))
        return ended[0]

    def connect(self, learner: int = 0) -> Session:
        """A session."""
        session = self.dial(learner)
        assert isinstance(session, Session), session
        return session

    def play(self, until: float) -> None:
        """Go on to this time."""
        reached: list[bool] = []
        self.time.at(until, lambda: reached.append(True), order=9)
        self.time.run(lambda: bool(reached))

    def upload(self, session: Session, num_bytes: int) -> float:
        """A contribution goes on its way; returns the time."""
        data = bytes(num_bytes)
        session.send("up", contribution(data), data)
        return self.time.now


def arrivals(events: list[tuple[float, Any]]) -> list[float]:
    """Times at which messages came."""
    return [at for at, event in events if isinstance(event, Arrival)]
