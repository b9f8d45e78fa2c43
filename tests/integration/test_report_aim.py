"""Real loggers of a whole simulated run, read back with their own readers; and an Aim repository
that is written by two runs at once, of which one is killed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dd_lightning.protocol.tape import read_tape
from dd_lightning.report.loggers import check_loggers, close_logs, open_logs
from tests.fleet_tapes import fleet_tape
from tests.simulated_runs import TINY, simulate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

END_S = 60.0  # to write what is queued, on a machine that does much else
# One run, until it is told to end or killed; says so once everything is with Aim
WRITE = """
import sys, time
from pathlib import Path
from dd_lightning.report.loggers import close_logs, open_logs
from tests.fleet_tapes import fleet_tape
events, folder, repo = fleet_tape(2, 30), Path(sys.argv[1]), sys.argv[2]
(log,) = open_logs({"aim": {"repo": repo, "experiment": "two"}}, "run", folder, {}, 0.0)
log._points.least_interval_s = 0.0
for event in [*events[: len(events) // 2], {"event": "nothing", "t_s": 0.0}]:
    log.event(event)  # once the last is taken, those before it are written
while log._queue and log.failure is None:
    time.sleep(0.01)
print("half", flush=True)
if input() == "end":
    for event in events[len(events) // 2 :]:
        log.event(event)
    print(close_logs([log], 60.0), flush=True)
"""


@dataclass
class Played:
    """A run that was simulated with every logger."""

    folder: Path
    repo: Path
    summary: dict[str, Any]
    tape: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.tape if one["event"] == event]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder, repo = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("repo")
    (folder / "figures").mkdir()
    Image.new("RGB", (4, 3)).save(folder / "figures" / "figure.png")  # as if the report had drawn
    simulate(
        tmp_path_factory.mktemp("data"),
        folder,
        "logger=[aim,tensorboard,wandb]",
        f"logger.aim.repo={repo}",
        "logger.aim.experiment=read_back",
        "simulate.step_s=1.0",  # virtual: points are at least two seconds apart
        "trainer.max_steps=40",
        "checkpoint.every_s=10",
        "network=us_eu",
        "chaos=kill_learner",
        "chaos.at_step=20",
        base=TINY,
    )
    summary = json.loads((folder / "summary.json").read_text())
    return Played(folder, repo, summary, list(read_tape(folder / "tape.jsonl")))


def runs_of(repo: Path) -> Iterator[Any]:
    import aim

    found = aim.Repo(str(repo))
    found._recreate_index()  # Aim shows a run only once it is indexed (`aim up` does it)
    return found.iter_runs()


def series_of(run: Any) -> dict[tuple[Any, ...], list[float]]:
    """By name and context the values, in the order of their steps."""
    return {
        (metric.name, *metric.context.to_dict().values()): metric.data.items_list()[1][0]
        for metric in run.metrics()
    }


def test_aim_has_the_whole_run(played: Played) -> None:
    (run,) = runs_of(played.repo)
    series = series_of(run)
    losses = [one["loss"] for one in played.of("learner_stats") if one["loss"] is not None]
    for learner in ("0", "1"):
        assert series["train_loss", learner] and set(series["train_loss", learner]) <= set(losses)
        assert all(rate >= 0 for rate in series["tokens_per_s", learner])
        assert all(gap >= 0 for gap in series["version_gap", learner])
        assert max(series["rtt_ms", learner]) > 0 and series["bytes_up", learner][-1] > 0
    cosines = [one["cosine"] for one in played.of("merge")]
    fragments = {one["fragment"] for one in played.of("merge")}
    assert any(cosine is not None for cosine in cosines)
    assert all(series["outer_norm", fragment] for fragment in fragments)
    found = [value for name, *key in series if name == "cosine" for value in series[name, *key]]
    assert found and set(found) <= set(cosines)
    assert sum(len(own) for (name, *_), own in series.items() if name == "staleness") > 0
    evaluations = [one["loss"] for one in played.of("evaluation")]
    assert sorted(series["validation_loss", "validation"]) == pytest.approx(sorted(evaluations))
    assert series["faults", "syncer"] == [1.0]


def test_aim_has_config_tags_summary_notes_and_figures(played: Played) -> None:
    from aim.storage.context import Context

    (run,) = runs_of(played.repo)
    assert run.experiment == "read_back" and not run.active
    assert {"experiment=read_back", "network=us_eu", "mode=simulate"} <= set(run.tags)
    assert run["hparams", "learners"] == 2 and run["config", "network", "name"] == "us_eu"
    assert run["summary", "status"] == "finished"
    assert run["summary", "loss", "validation"] == played.summary["loss"]["validation"]
    for kind, said in (("fault", "s: kill, learner 1"), ("course", "learner 1 joined")):
        texts = run.get_text_sequence("events", Context({"kind": kind})).values.sparse_list()[1]
        assert any(said in text.data for text in texts), texts
    drawn = run.get_image_sequence("figure", Context({"report": "figure"}))
    assert drawn.values.sparse_list()[1][0].width == 4


def test_tensorboard_has_the_same_points_at_the_runs_own_time(played: Played) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(played.folder / "tensorboard"))
    found.Reload()
    (run,) = runs_of(played.repo)
    loss = found.Scalars("train_loss/learner 0")
    assert [one.value for one in loss] == pytest.approx(series_of(run)["train_loss", "0"])
    merges = found.Scalars("run_seconds/syncer")  # seconds, in virtual time
    elapsed = [one.wall_time - merges[0].wall_time for one in merges]
    assert elapsed == pytest.approx([one.value - merges[0].value for one in merges], abs=0.01)
    assert "summary/text_summary" in found.Tags()["tensors"]
    assert found.Tags()["images"] == ["figures/figure"]


def test_wandb_keeps_everything_offline(played: Played) -> None:
    files = sorted((played.folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1  # syncer's, launcher's
    rows = [row for path in files for row in history(path)]
    losses = [row["train_loss/learner 0"] for row in rows if "train_loss/learner 0" in row]
    (run,) = runs_of(played.repo)
    assert losses == pytest.approx(series_of(run)["train_loss", "0"])
    assert all("axis/inner_step" in row for row in rows if "train_loss/learner 0" in row)
    assert any("validation_loss/validation" in row for row in rows)


def history(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .wandb file: 7 bytes of header, then LevelDB's log format with protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, block = path.read_bytes(), 7, b"", 1 << 15
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                items = record.history.item
                yield {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}


def test_the_repository_survives_a_killed_run_and_two_at_once(tmp_path: Path) -> None:
    repo, folders = tmp_path / "repo", [tmp_path / "one", tmp_path / "two"]
    repo.mkdir()
    writers = []
    for folder in folders:
        folder.mkdir()
        command = [sys.executable, "-c", WRITE, str(folder), str(repo)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        writers.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
    try:
        killed, whole = writers
        assert [one.stdout.readline() for one in writers] == ["half\n"] * 2
        killed.kill()
        killed.wait()
        assert whole.communicate("end\n", timeout=END_S)[0] == "[]\n"
    finally:
        for one in writers:
            one.kill()
            one.communicate()
    events = fleet_tape(2, 30)
    settings = check_loggers({"aim": {"repo": str(repo), "experiment": "two"}})
    half = len(events) // 2
    past = lambda: events[:half]  # noqa: E731 (as the syncer gives it)
    (log,) = open_logs(settings, "run", folders[0], {}, 0.0, past)  # the killed one goes on
    log._points.least_interval_s = 0.0
    for event in events[half:]:
        log.event(event)
    assert close_logs([log], END_S, summary={"status": "finished"}) == []
    first, second = runs_of(repo)
    assert series_of(first) == series_of(second)
    assert len(series_of(first)["train_loss", "1"]) == 16
    assert {one.name.split()[0] for one in (first, second)} == {"one", "two"}


def test_an_aim_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    settings = check_loggers({"aim": {"repo": str(tmp_path / "file")}})
    (log,) = open_logs(settings, "run", tmp_path, {}, 0.0)
    log.event(fleet_tape(2, 2)[0])
    assert "logger aim failed" in "".join(close_logs([log], END_S))
    assert "logger aim failed and gets nothing more" in caplog.text
