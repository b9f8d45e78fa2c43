"""Virtual time: runs of the real parts with faults, replays, fleets of chips, estimates."""
