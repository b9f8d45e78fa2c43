"""Its presence makes the repository's root importable: tests share `tests.tapes` and the like."""
