"""Links of a simulated run: times are the link model's, an outage ends as in a real run."""

from __future__ import annotations

from statistics import median

import pytest

from dd_lightning.network.lane import chunk_bytes
from dd_lightning.network.link import LinkModel
from dd_lightning.network.profiles import WanProfile
from dd_lightning.protocol.tape import read_tape
from dd_lightning.simulate.flows import ShapedFlow
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.transport.frames import DATA
from tests.integration.test_simulate import simulate  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

BOUND_S = 2.0  # beyond a round trip, as in tests/integration/test_outage.py
CALM = ["network=us_eu", "network.links.default.jitter_ms=0"]


def events(folder, kind, learner):
    found = read_tape(folder / "tape.jsonl")
    return [row for row in found if row["event"] == kind and row["learner"] == learner]


def test_transfer_times_are_the_link_models_own(simulate, monkeypatch):  # noqa: F811
    """Each payload of Ireland's learner again, over paths of a model of its own. In the run small
    messages took turns with them, and delayed them by as much as they are long."""
    flows, sent = {}, []
    real_session, real_send = VirtualNetwork._session, ShapedFlow.send

    def session(network, learner, *rest):
        made = real_session(network, learner, *rest)
        if learner == 1:
            flows.update({made.flows[way, DATA]: (made.name, way) for way in ("up", "down")})
        return made

    def send(flow, num_bytes, arrived):
        began = flow._time.now
        row = {"flow": flow, "bytes": num_bytes, "began": began}
        sent.append(row)

        def noted():
            row["came"] = flow._time.now
            arrived()

        real_send(flow, num_bytes, noted)

    monkeypatch.setattr(VirtualNetwork, "_session", session)
    monkeypatch.setattr(ShapedFlow, "send", send)
    slow = 0.01  # so that a fragment takes a while
    overrides = [*CALM, f"network.bandwidth_scale={slow}", "simulate.step_s=1.0"]
    simulate(*overrides)
    profile = WanProfile.from_config(simulate.settings(*overrides).values["network"])
    model, paths, errors = LinkModel(profile), {}, []
    for row in sent:
        if row["flow"] not in flows or not row["bytes"]:
            continue
        key = flows[row["flow"]]
        path = paths.setdefault(key, model.path("eu_west", key[1]))
        for begin in range(0, row["bytes"], chunk := chunk_bytes(profile.link("eu_west"), key[1])):
            came = path.send(row["began"], min(chunk, row["bytes"] - begin))
        expected_s = came - row["began"]
        if "came" in row:  # the last ones are on their way when the run ends
            assert row["bytes"] > 10_000 and expected_s > 0.1
            errors.append(abs(row["came"] - row["began"] - expected_s) / expected_s)
    assert len(errors) > 20 and max(errors) < 0.02 and median(errors) < 0.001, errors


def test_after_an_outage_a_learner_is_back_at_once_and_has_lost_no_step(simulate):  # noqa: F811
    begin_s, seconds = 20.0, 10.0
    outage = f"{{region: eu_west, start_s: {begin_s}, seconds: {seconds}}}"
    folder, summary = simulate(
        *CALM, f"network.outages=[{outage}]", "simulate.step_s=1.0", "trainer.max_steps=45"
    )
    first, again = events(folder, "join", "1")
    assert (again["generation"], again["cause"], again["continues"]) == (2, "re-attach", True)
    assert 0 < again["t_s"] - begin_s - seconds < BOUND_S + 0.066
    assert again["step"] >= first["step"] + begin_s + seconds - 2  # it trained on
    accepted = [row for row in events(folder, "contribution", "1") if row["generation"] == 2]
    assert accepted[0]["verdict"] == "accepted" and accepted[0]["steps"] > seconds
    assert len(events(folder, "join", "0")) == 1  # Virginia noticed nothing
    for row in summary["per_learner"]["1"]["ledger"]:
        assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
