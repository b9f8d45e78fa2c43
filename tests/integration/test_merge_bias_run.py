"""How far a merge moves, from the tape and the Θ of a real simulated run."""

from __future__ import annotations

import pytest
import yaml

from dd_lightning.protocol.tape import read_tape
from dd_lightning.simulate.merge_bias import measure_moves, merges_on, share_of
from dd_lightning.syncer.checkpoint import checkpoints
from tests.integration.test_simulate import simulate  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.integration, pytest.mark.virtual]


def test_merges_of_one_learner_spread_more_than_those_of_both(simulate):  # noqa: F811
    folder, _ = simulate("learners=2", "trainer.max_steps=36")
    values = yaml.safe_load((folder / "config.yaml").read_text())
    both = [m for m in merges_on(read_tape(folder / "tape.jsonl")) if len(m) == 2]
    assert both and share_of(both, "0") == pytest.approx(0.5, abs=0.1)
    kinds = {"both": both, "first": [merge[:1] for merge in both]}
    theta = checkpoints(folder / "syncer")[:1]
    moved = measure_moves(values, theta, kinds, "both", draws=4, samples=3)
    same, first = moved["both"], moved["first"]
    assert (same.length, same.bias) == (1.0, 0.0) and same.cosine == pytest.approx(1.0)
    assert first.spread > same.spread > 0
    assert 0.8 < first.cosine <= 1.01 and first.bias < first.spread
