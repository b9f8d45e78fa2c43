"""Run one experiment, or a sweep with -m: `python scripts/launch.py -m network=lan,us_eu`."""

from dd_lightning.launch.app import main

if __name__ == "__main__":
    main()
