"""Wide-area network conditions: named profiles, the link model, and a TCP proxy that applies it."""

from dd_lightning.network.link import LinkModel, Path, flow_rate_bit_s, transfer_s
from dd_lightning.network.profiles import Link, Outage, WanProfile

__all__ = ["Link", "LinkModel", "Outage", "Path", "WanProfile", "flow_rate_bit_s", "transfer_s"]
