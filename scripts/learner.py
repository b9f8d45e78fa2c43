"""One learner of the kit by hand, on this or another machine than the syncer's.

DD_SYNCER=tcp://HOST:PORT python scripts/learner.py RUN/config.yaml --learner 0
"""

from dd_lightning.launch.learner import main

if __name__ == "__main__":
    main()
