"""A wheel holds every YAML and every module of the packages."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PLACES = {
    "dd_lightning": "dd_lightning",
    "conf": "dd_lightning/conf",
    "tasks": "dd_lightning/tasks",
}
BUILD_TIMEOUT_S = 110


def test_the_wheel_holds_every_yaml_and_module(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in PLACES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--wheel-dir", str(tmp_path), str(source)]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    built = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=BUILD_TIMEOUT_S
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{place}/{path.relative_to(ROOT / folder)}"
        for folder, place in PLACES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts
    }
    assert expected - held == set()
    assert any(name.endswith("licenses/LICENSE") for name in held)
