"""`docs/lightning.md` says what the suite shows, and no cell is left out for nothing."""

from pathlib import Path

import pytest

from tests.conformance.cells import FEATURES, INNER, LEFT_OUT, cells, table
from tests.conformance.group_runs import GROUPS
from tests.conformance.scenarios import SCENARIOS

pytestmark = pytest.mark.unit
PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
ROWS = [*FEATURES, *SCENARIOS]


def test_the_page_holds_the_table():
    page = PAGE.read_text()
    between = page.partition("<!-- table -->\n")[2].partition("\n<!-- end of table -->")[0]
    assert between == table(), "put the output of `python -m tests.conformance.table` there"


def test_every_row_has_a_name_and_a_cell_of_its_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) == len({row.title for row in ROWS})
    for row in ROWS:
        assert any((row.name, inner) not in LEFT_OUT for inner in INNER), row.name


def test_what_is_left_out_exists_and_has_a_reason():
    known = {(row.name, inner) for row in ROWS for inner in INNER}
    assert LEFT_OUT.keys() <= known
    assert all(len(reason) > 20 for reason in LEFT_OUT.values())


def test_make_test_runs_one_cell_of_each_row_and_some_of_each_group():
    chosen = [(row.name, inner) for row, inner, is_chosen in cells(ROWS) if is_chosen]
    assert [name for name, _ in chosen] == [row.name for row in ROWS]
    assert all(sum(inner == column for _, inner in chosen) > 1 for column in ("auto", *GROUPS))
