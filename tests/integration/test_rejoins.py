"""One learner id rejoins ten times in a row; what its old connections still say has no effect."""

import time

import pytest
from msgspec.structs import replace

from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.messages import Finish, Goodbye, Join, Progress, Refused
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.rendezvous import lookup
from tests.socket_run import run_over_sockets
from tests.syncer_learner import ScriptedLearner
from tests.trainers import WAIT_S

pytestmark = pytest.mark.integration
LIVES = 10


class Life(ScriptedLearner):
    """Joins again when it is told that the id is still held."""

    takeover = False

    def join(self):
        send = self.channel.send
        self.channel.send = lambda message, *payload: send(
            replace(message, takeover=self.takeover) if isinstance(message, Join) else message,
            *payload,
        )
        super().join()
        del self.channel.send

    def _receive(self, message, payload):
        if isinstance(message, Refused):
            assert not message.fatal, message.reason
            self.join()
        super()._receive(message, payload)


def connect(address):
    return LearnerChannel(lookup(address, WAIT_S), max_message_bytes=1 << 20)


def turns(life, condition):
    """Turns of a scripted learner until it is so."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"a life stands still at step {life.step}"
        life.turn()


def stray(generation):
    """What an old connection may still say."""
    return (
        Progress(generation=generation, step=10**6, odometer=10**9, losses=(9.0,)),
        Finish(generation=generation, step=10**6, odometer=10**9),
        Goodbye(generation=generation, reason="stray"),
    )


@pytest.mark.parametrize("left_open", [False, True])
def test_ten_rejoins_in_a_row(tmp_path, left_open):
    lives, keeper = [], []

    def rejoins(address):
        for _ in range(LIVES):
            life = Life(connect(address), "1", steps=10**6)
            life.takeover = left_open
            life.join()
            turns(life, lambda life=life: life.step >= 3)
            for old in lives:
                if left_open:
                    for message in stray(old.welcome.generation):
                        old.channel.send(message)  # refused, or the connection has been closed
            turns(life, lambda life=life: life.step >= 6)
            lives.append(life)
            if not left_open:
                life.channel.close()
        last = Life(connect(address), "1", steps=6)
        last.takeover = left_open
        lives.append(last)
        last.run(WAIT_S)
        keeper[0].steps = keeper[0].step
        for life in lives:
            life.channel.close()

    def keeps_training(address):
        keeper.append(ScriptedLearner(connect(address), "0", steps=10**6))
        keeper[0].run(2 * WAIT_S)
        keeper[0].channel.close()

    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 4}
    timeouts = {"rejoin": WAIT_S, "heartbeat": 0.5, "lease": 5.0, "finish": WAIT_S}
    config = SyncerConfig.load({"algorithm": algorithm, "learners": 2, "timeouts": timeouts})
    tape = run_over_sockets(tmp_path, config, keeps_training, rejoins)
    generations = [e["generation"] for e in tape if e["event"] == "join" and e["learner"] == "1"]
    assert generations == list(range(1, LIVES + 2))
    assert [life.welcome.generation for life in lives] == generations
    done = [e for e in tape if e["event"] == "state" and e["state"] == "finishing"]
    assert [(e["learner"], e["generation"]) for e in done].count(("1", LIVES + 1)) == 1
    assert len([e for e in done if e["learner"] == "1"]) == 1  # no stray Finish counted
    (ledger,) = [e for e in tape if e["event"] == "ledger" and e["learner"] == "1"]
    for row in ledger["fragments"]:
        assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
        assert 0 < row["processed"] <= sum(life.odometer for life in lives)
