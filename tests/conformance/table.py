"""Prints the table for `docs/lightning.md`: `python -m tests.conformance.table`."""

from tests.conformance.cells import table

if __name__ == "__main__":
    print(table())
