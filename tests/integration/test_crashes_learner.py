"""A learner dies at every named point; it is started again, and the run ends as it should."""

from __future__ import annotations

import pytest

from dd_lightning.crash_points import LEARNER_POINTS
from tests.crash_checks import check_run
from tests.crash_roles import Learner, Role, Syncer

pytestmark = pytest.mark.integration

ARRIVALS = {  # the point's nth arrival, where the first says little
    "learner.stepped": 20,
    "learner.snapshot_taken": 3,
    "learner.upload_encoded": 4,
    "learner.upload_sent": 4,
    "learner.applied": 5,
    "learner.checkpoint_begun": 2,
    "learner.checkpoint_written": 2,
}
OVER = {"learner.released"}  # all it did is merged and on the disk: the run ends without it
OFTEN = {"learner.half_loaded", "learner.upload_sent", "learner.applied", "learner.finish_said"}


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=() if p in OFTEN else pytest.mark.slow) for p in LEARNER_POINTS],
)
def test_a_learner_dies_and_is_started_again(tmp_path, point) -> None:
    roles: list[Role] = []
    try:
        syncer = Syncer(tmp_path, 1)
        roles.append(syncer)
        address = syncer.said()["listening"]
        other = Learner(tmp_path, "0", address)
        roles.append(other)
        victim = Learner(tmp_path, "1", address, f"{point}:{ARRIVALS.get(point, 1)}")
        roles.append(victim)
        assert victim.died(), f"{point} did not fire"
        ending = [other, syncer]
        if point not in OVER:
            ending.insert(0, Learner(tmp_path, "1", address))
            roles.append(ending[0])
        for role in ending:
            assert not role.died() and role.process.exitcode == 0
    finally:
        for role in roles:
            if role.process.is_alive():
                role.kill()
    check_run(tmp_path, [point])
