"""The syncer alone: `python scripts/syncer.py --listen tcp://127.0.0.1:29400 --run-dir DIR`."""

import sys

from dd_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main(["syncer", *sys.argv[1:]]))
