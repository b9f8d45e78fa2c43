"""Plain lines and the table show the syncer's status with the evaluator's newest loss."""

import io
import json

import pytest
from rich.console import Console

from dd_lightning.launch.view import PlainView, TableView, open_view

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "syncer").mkdir()
    status = {"t_s": 12.0, "state": "running", "learners": {"0": {"state": "training", "step": 7}}}
    (tmp_path / "syncer" / "status.json").write_text(json.dumps(status))
    (tmp_path / "evaluations.jsonl").write_text('{"file": "a", "loss": 3.25}\n')
    return tmp_path


def test_plain_lines(folder, capsys):
    with PlainView(folder) as view:
        view.say("a message")
        view.refresh()
        view.refresh()  # too early for another line
    message, line = capsys.readouterr().out.splitlines()
    assert message == "a message"
    assert "0 training 7" in line and "3.25" in line


def test_the_table(folder):
    out = io.StringIO()
    with TableView(folder, Console(file=out, force_terminal=True, width=140)) as view:
        view.say("[not markup]")
        view.refresh()
    assert "training" in out.getvalue() and "[not markup]" in out.getvalue()


def test_nothing_is_shown_before_there_is_a_status(tmp_path, capsys):
    with open_view(tmp_path) as view:  # pytest's stdout is no terminal
        view.refresh()
    assert capsys.readouterr().out == ""
