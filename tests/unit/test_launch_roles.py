"""The command lines of processes that go on with a run."""

import os
import time
import zipfile

import pytest

from dd_lightning.launch.roles import Roles
from dd_lightning.launch.settings import check
from tests.unit.test_launch_settings import resolved

pytestmark = pytest.mark.unit


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Roles of a run of `overrides`, whose processes are not started but told by their words."""

    def make(*overrides):
        roles = Roles(check(resolved(*overrides)), tmp_path, interrupt=None)
        monkeypatch.setattr(roles, "_child", lambda name, command, *_, **__: command)
        return roles

    return make


def test_a_new_run_has_neither_resume_nor_cut(commands):
    roles = commands()
    assert not {"--resume", "--cut"} & set(roles.start_syncer())
    assert "--checkpoint" not in roles.start_learner("0")


def test_the_newest_checkpoints_need_no_more_than_resume(commands):
    command = commands("launcher.resume=last").start_syncer(resume=True)
    assert "--resume" in command and "--cut" not in command


def test_a_cut_is_restored_until_there_is_a_checkpoint_after_it(commands, tmp_path):
    syncer, cut = tmp_path / "syncer", tmp_path / "learners" / "0" / "cuts" / "c2.ckpt"
    for folder in (syncer, cut.parent):
        folder.mkdir(parents=True)
    cut.write_bytes(b"")
    late = syncer / "step-1-40.ckpt"  # of the time between the cut and the interrupt
    zipfile.ZipFile(late, "w").close()
    os.utime(late, (1.0, 1.0))
    roles = commands("launcher.resume=c2")
    for _ in range(2):  # the second: killed before its first checkpoint
        assert roles.start_syncer(resume=True)[-2:] == ["--cut", "c2"]
    assert roles.start_learner("0")[-2:] == ["--checkpoint", str(cut)]
    assert "--checkpoint" not in roles.start_learner("1")  # it was not in the cut
    later = syncer / "step-2-41.ckpt"
    zipfile.ZipFile(later, "w").close()
    os.utime(later, (time.time() + 10.0,) * 2)
    assert "--cut" not in roles.start_syncer(resume=True)
