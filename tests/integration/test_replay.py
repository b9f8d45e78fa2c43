"""`replay`: simulated and doctored tapes; equal bit for bit, or the first difference by name."""

from __future__ import annotations

import json
import shutil

import pytest

from dd_lightning.cli import main
from dd_lightning.protocol.tape import read_tape
from tests.integration.test_simulate import simulate  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.integration, pytest.mark.virtual]


def replayed(capsys, folder):
    """(exit code, what `--json` printed)."""
    capsys.readouterr()
    code = main(["replay", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def plain(simulate):  # noqa: F811
    """A run over a link, with jitter."""
    return simulate("network=us_eu", "simulate.distribution=normal", "simulate.jitter=0.1")


def test_a_run_is_replayed_bit_for_bit(capsys, plain):
    folder, summary = plain
    code, found = replayed(capsys, folder)
    assert (code, found["equal"], found["first_difference"]) == (0, True, None)
    assert found["merges"] == summary["rounds"]


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.apply=rebase", "algorithm.codec=bf16"],
        ["algorithm.apply=mix", "algorithm.mix_alpha=0.5"],
        ["algorithm=streaming", "algorithm.sync_every=6", "algorithm.fragments=3"],
    ],
    ids=["rebase", "mix", "streaming"],
)
def test_every_apply_mode_and_waiting(capsys, simulate, settings):  # noqa: F811
    folder, _ = simulate("network=us_eu", *settings)
    code, found = replayed(capsys, folder)
    assert code == 0, found


def doctored(folder, to, change):
    """A copy of the run whose tape `change` has gone over, event by event."""
    copy = to / "doctored"
    shutil.copytree(folder, copy)
    rows = [change(dict(event)) for event in read_tape(folder / "tape.jsonl")]
    text = "".join(json.dumps(row) + "\n" for row in rows if row is not None)
    (copy / "tape.jsonl").write_text(text)
    return copy


def test_a_doctored_digest_is_found_at_its_round(capsys, plain, tmp_path):
    def change(event):
        if event["event"] == "merge" and event["round"] == 7:
            event["digest"] = "0" * 16
        return event

    code, found = replayed(capsys, doctored(plain[0], tmp_path, change))
    assert code == 1 and found["merges"] == 6
    where = found["first_difference"]
    assert (where["epoch"], where["round"], where["fragment"]) == (1, 7, 0)


def test_a_doctored_contribution_is_found_with_its_learner(capsys, plain, tmp_path):
    rows = list(read_tape(plain[0] / "tape.jsonl"))
    victim = next(
        row for row in rows if row["event"] == "contribution" and row["verdict"] == "accepted"
        and row["round"] > 5
    )  # fmt: skip

    def change(event):
        if event == victim:
            event["tokens"] += 1
        return event

    code, found = replayed(capsys, doctored(plain[0], tmp_path, change))
    where = found["first_difference"]
    assert code == 1
    assert (where["round"], where["learner"]) == (victim["round"], victim["learner"])
    assert "tokens" in where["what"]


def test_an_apply_moved_by_a_step_is_found(capsys, plain, tmp_path):
    rows = list(read_tape(plain[0] / "tape.jsonl"))
    applies = [row for row in rows if row["event"] == "apply" and row["step"] > 8]

    def change(event):
        if event == applies[0]:
            event["step"] += 1
        return event

    code, found = replayed(capsys, doctored(plain[0], tmp_path, change))
    assert code == 1 and found["first_difference"]["learner"] == applies[0]["learner"]


def test_a_tape_that_cannot_be_replayed_says_why(capsys, plain, tmp_path):
    def alone(event):
        if event["event"] == "run":
            event["config"] = {"mode": "processes"}
        return event

    folder = doctored(plain[0], tmp_path, alone)
    assert main(["replay", str(folder)]) == 2
    assert "a syncer that was started alone" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "allowed: a tape.jsonl" in capsys.readouterr().err
