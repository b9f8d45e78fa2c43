"""docs/configuration.md says what the YAML files and the code say, and explains every key."""

from pathlib import Path

import pytest

from dd_lightning.report.reference import DETAILED, keys_of, reference

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_script_writes():
    written = (ROOT / "docs" / "configuration.md").read_text()
    told = "docs/configuration.md is old: run python scripts/configuration_reference.py"
    assert written == reference(ROOT / "conf"), told


@pytest.mark.parametrize("name", sorted(set(DETAILED) - {"trainer/default", "timeouts/default"}))
def test_every_key_of_ours_is_explained(name):
    keys = keys_of(ROOT / "conf" / f"{name}.yaml")
    assert keys
    inherited = ("preset", "links.")  # links are pairs of the profile's own regions
    bare = [key.name for key in keys if not key.meaning and not key.name.startswith(inherited)]
    assert not bare


def test_comments_are_found_beside_above_and_below(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(
        "# head\n"
        "a: 1  # beside\n"
        "# above\n"
        "b: {c: 2}\n"
        "d:\n"
        "  e: null      # beside,\n"
        "               # and below\n"
        "  f: [1,\n"
        "      2]\n"
        "defaults: [x]\n"
    )
    found = [(key.name, key.default, key.meaning) for key in keys_of(file)]
    assert found == [
        ("a", "1", "beside"),
        ("b", "{c: 2}", "above"),
        ("d.e", "null", "beside, and below"),
        ("d.f", "[1, 2]", ""),
    ]
