"""Virtual time: fleets of millions of chips (`goodput`), without training anything."""
