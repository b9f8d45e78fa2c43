"""Writes docs/configuration.md from conf/ and the code, so that it cannot say what is not there.

`python scripts/configuration_reference.py [--check]`: every key with its default and the comment
beside it, every choice of every group with the first sentence of its file.
"""

import argparse
import sys
from pathlib import Path

from dd_lightning.report.reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    arguments = parser.parse_args()
    text = reference(PAGE.parents[1] / "conf")
    if arguments.check:
        same = PAGE.exists() and PAGE.read_text() == text
        print("up to date" if same else f"{PAGE.name} differs: run this script without --check")
        return 0 if same else 1
    PAGE.write_text(text)
    print(f"{PAGE}: {text.count(chr(10))} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
