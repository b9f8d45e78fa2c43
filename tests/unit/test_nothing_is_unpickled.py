"""No code of the package can run what a stranger, or a file, would have it run."""

import ast
from pathlib import Path

import pytest

import dd_lightning

pytestmark = pytest.mark.unit

ROOT = Path(dd_lightning.__file__).parent
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
ERROR_ONLY = ["UnpicklingError"]
CALLS = {"recv_pyobj", "send_pyobj", "recv_object_list", "broadcast_object_list", "eval", "exec"}


def modules():
    found = sorted(ROOT.rglob("*.py"))
    assert len(found) > 100
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in found]


def name_of(call):
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def owner_of(call):
    value = getattr(call.func, "value", None)
    return getattr(value, "id", getattr(value, "attr", ""))


@pytest.fixture(scope="module")
def nodes():
    return [(path, node) for path, tree in modules() for node in ast.walk(tree)]


def test_no_module_that_unpickles_is_imported(nodes):
    for path, node in nodes:
        names = []
        if isinstance(node, ast.ImportFrom) and [a.name for a in node.names] == ERROR_ONLY:
            continue  # what torch raises for a file that is none
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & FORBIDDEN, path


def test_no_call_that_unpickles_or_runs_text(nodes):
    calls = [(path, node) for path, node in nodes if isinstance(node, ast.Call)]
    bad = [f"{path}:{call.lineno}" for path, call in calls
           if name_of(call) in CALLS]  # fmt: skip
    assert bad == []


def test_torch_loads_weights_only_and_yaml_loads_plain_values(nodes):
    seen = 0
    for path, node in nodes:
        if not isinstance(node, ast.Call):
            continue
        if (owner_of(node), name_of(node)) == ("torch", "load"):
            seen += 1
            given = {word.arg: word.value for word in node.keywords}
            assert getattr(given.get("weights_only"), "value", None) is True, (
                f"{path}:{node.lineno}"
            )
        if owner_of(node) == "yaml":
            # compose makes nodes of the text, never objects
            plain = ("safe_load", "safe_dump", "compose")
            assert name_of(node) in plain, f"{path}:{node.lineno}"
        if owner_of(node) in ("np", "numpy") and name_of(node) == "load":
            given = {word.arg: word.value for word in node.keywords}
            assert getattr(given.get("allow_pickle"), "value", False) is False, path
    assert seen  # checkpoints are read somewhere, so this looks at something
