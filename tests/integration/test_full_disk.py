"""A real disk that is full while a run goes on: a small tmpfs holds the run's folder."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.crash_checks import check_run
from tests.crash_roles import WAIT_S, Syncer, train
from tests.syncer_process import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs takes root"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]

SIZE_KIB = 1024
STEPS = 400  # enough that merges go on while the disk is full


@pytest.fixture
def disk(tmp_path):
    """The run's folder on a tmpfs of its own."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the space that is left."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (65536, 4096, 512):
            while True:
                try:
                    written = file.write(bytes(size))
                except OSError:
                    break
                if written < size:
                    break
    return filler


def test_a_run_outlives_a_full_disk(tmp_path, disk) -> None:
    syncer = Syncer(tmp_path, 1)
    log = tmp_path / "syncer1.err"
    errors: list[BaseException] = []

    def go(learner: str, address: str) -> None:
        try:
            train(tmp_path, learner, address, STEPS)
        except BaseException as error:
            errors.append(error)

    try:
        address = syncer.said()["listening"]
        threads = [threading.Thread(target=go, args=(n, address), daemon=True) for n in "01"]
        for thread in threads:
            thread.start()
        until(lambda: any((disk / "syncer").glob("step-1-[1-9]*.ckpt")))
        filler = fill(disk)
        until(lambda: "no checkpoint: " in log.read_text() and "the tape cannot" in log.read_text())
        assert syncer.process.is_alive()
        filler.unlink()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert not syncer.died() and syncer.process.exitcode == 0 and errors == []
    finally:
        if syncer.process.is_alive():
            syncer.kill()
    events = check_run(tmp_path, [])
    said = [event["text"] for event in events if event["event"] == "warning"]
    for start in (
        "no checkpoint: step-1-",
        "the tape cannot be written",
        "checkpoints are written",
    ):
        assert any(text.startswith(start) for text in said), said
    full_s = next(e["t_s"] for e in events if e.get("text", "").startswith("no checkpoint"))
    again_s = next(e["t_s"] for e in events if e.get("text", "") == "checkpoints are written again")
    merges = [event for event in events if event["event"] == "merge"]
    assert any(full_s < merge["t_s"] < again_s for merge in merges)  # it went on meanwhile
