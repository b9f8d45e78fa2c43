"""Puts `tests/` on the path, so that every kind of test can import its helpers (`tapes`)."""
