"""The small disk: a real tmpfs that fills up, is freed, and leaves its files in the folder."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from dd_lightning.chaos.disk import SmallDisk
from dd_lightning.chaos.plan import _may_mount
from dd_lightning.chaos.signals import pause, resume

pytestmark = pytest.mark.integration

needs_root = pytest.mark.skipif(not _may_mount(), reason="mounts a tmpfs: Linux and root")


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "syncer"
    folder.mkdir()
    (folder / "epoch").write_text("3")  # of a run that is gone on with
    disk = SmallDisk(folder, size_mib=1)
    disk.mount()
    yield disk, folder
    disk.unmount()


@needs_root
def test_a_full_disk_refuses_and_a_freed_one_takes(disk):
    disk, folder = disk
    assert (folder / "epoch").read_text() == "3"
    (folder / "before").write_bytes(bytes(1000))
    disk.fill()
    with pytest.raises(OSError) as refused:
        (folder / "more").write_bytes(bytes(100_000))
    assert refused.value.errno == errno.ENOSPC
    disk.free()
    (folder / "more").write_bytes(bytes(100_000))


@needs_root
def test_its_files_are_in_the_ordinary_folder_afterwards(disk, tmp_path):
    disk, folder = disk
    (folder / "step-1-4.ckpt").write_bytes(b"checkpoint")
    disk.fill()
    disk.unmount()
    disk.unmount()
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert (folder / "step-1-4.ckpt").read_bytes() == b"checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["epoch", "step-1-4.ckpt"]
    assert [path.name for path in tmp_path.iterdir()] == ["syncer"]


@needs_root
def test_a_mount_that_fails_says_what_the_system_said(tmp_path, monkeypatch):
    disk = SmallDisk(tmp_path / "syncer", size_mib=1)
    monkeypatch.setenv("PATH", str(tmp_path))  # no `mount` in it
    with pytest.raises(OSError, match="mount"):
        disk.mount()


def test_a_paused_process_goes_on_by_itself():
    code = "import time\nwhile True: print(time.monotonic(), flush=True); time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            times = [float(child.stdout.readline())]
            waker = pause(child.pid, 1.0)
            assert waker.wait(60) == 0
            while len(times) < 2 or times[-1] - times[-2] < 0.8:  # bounded by the test's timeout
                times.append(float(child.stdout.readline()))
        finally:
            child.kill()
    resume(child.pid)  # it has gone: no error
