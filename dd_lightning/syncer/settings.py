"""Settings of `dd-lightning syncer`: the command line, the file, and overrides, all checked."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dd_lightning.algorithm import (
    CODECS,
    FRAGMENTERS,
    MERGE_RULES,
    check_choice,
    check_outer,
    refuse,
    resolve,
)
from dd_lightning.algorithm.presets import PRESETS
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.syncer.checkpoint import checkpoints, newest_checkpoint
from dd_lightning.syncer.cuts import read_manifest
from dd_lightning.syncer.lock import LOCK
from dd_lightning.transport.keys import SyncerKeys, load_syncer_keys

TAPE = "tape.jsonl"


@dataclass(frozen=True, slots=True)
class SyncerSettings:
    """What one start of the syncer is told."""

    listen: str
    run_dir: Path
    resume: bool
    config: SyncerConfig
    loggers: dict[str, dict[str, Any]] = field(default_factory=dict)  # see report/loggers.py
    keys: SyncerKeys | None = None
    cut: str | None = None  # restore the whole run from this consistent cut


def parse(argv: list[str]) -> SyncerSettings:
    """Parse and check everything; nothing is started or written.

    Raises:
        ValueError: a setting is wrong.
        SystemExit: --help.
    """
    arguments = _parser().parse_intermixed_args(argv)
    config = load_config(arguments.config, arguments.settings)
    keys = _load_keys(arguments.key, arguments.allow)
    check_listen(arguments.listen, config.insecure or keys is not None)
    if keys is not None and config.insecure:
        warnings.warn("insecure: true has no effect with --key and --allow", stacklevel=2)
    _check_run_dir(arguments.run_dir, arguments.resume)
    if arguments.cut is not None:
        if not arguments.resume:
            raise refuse("--cut", arguments.cut, "an id together with --resume")
        read_manifest(arguments.run_dir / "syncer", arguments.cut)
    return SyncerSettings(
        listen=arguments.listen,
        run_dir=arguments.run_dir,
        resume=arguments.resume,
        config=config,
        loggers=_load_loggers(arguments.logger),
        keys=keys,
        cut=arguments.cut,
    )


def load_config(file: Path | None, overrides: list[str]) -> SyncerConfig:
    """SyncerConfig from a YAML file and `key=value` overrides; `algorithm=NAME` is a preset.

    Raises:
        ValueError: the file is missing or no mapping, or a setting is wrong.
    """
    values = {} if file is None else _read(file)
    if isinstance(values.get("algorithm"), str):  # the same short form as on the command line
        check_choice("algorithm", values["algorithm"], PRESETS)
        values["algorithm"] = {"preset": values["algorithm"]}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise refuse("override", override, "key=value, such as algorithm.quorum=2")
        if key == "algorithm":
            check_choice("algorithm", value, PRESETS)
            override = f"algorithm.preset={value}"
        try:
            values = OmegaConf.merge(values, OmegaConf.from_dotlist([override]))
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            fix = f"It does not fit what is there: {error}"
            raise refuse("override", override, "key=value", fix) from error
    plain = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    assert isinstance(plain, dict)  # `_read` looks
    config = SyncerConfig.load(plain)
    check_outer(config.algorithm.outer)
    resolve("merge", config.algorithm.merge, MERGE_RULES)
    resolve("codec", config.algorithm.codec, CODECS)
    resolve("fragmentation", config.algorithm.fragmentation, FRAGMENTERS)
    return config


def _load_loggers(given: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for one in given:
        name, _, text = one.partition("=")
        try:
            options = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise refuse("--logger", one, "NAME or NAME={...}", str(error)) from error
        if not isinstance(options, dict):
            raise refuse("--logger", one, "NAME or NAME={...}, such as 'aim={repo: DIR}'")
        found[name] = options
    if not found:
        return found
    from dd_lightning.report.loggers import check_loggers

    return check_loggers(found)


def _load_keys(key: Path | None, allow: Path | None) -> SyncerKeys | None:
    if key is None and allow is None:
        return None
    if key is None or allow is None:
        given, missing = ("--allow", "--key") if key is None else ("--key", "--allow")
        fix = "`dd-lightning keys new` makes syncer.key for --key and allowed.yaml for --allow."
        raise refuse(missing, None, f"a file, together with {given}", fix)
    return load_syncer_keys(key, allow)


def check_listen(listen: str, open_to_others: bool) -> tuple[str, int]:
    """(host, port) of tcp://HOST:PORT.

    Raises:
        ValueError: another form, or a host off loopback unless `open_to_others`, which takes keys
            or `insecure`.
    """
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if not listen.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise refuse("--listen", listen, "tcp://HOST:PORT, with port 0 for any free one")
    if not host.startswith("127.") and host != "localhost" and not open_to_others:
        fix = (
            "Traffic is not encrypted: make keys with `dd-lightning keys new` and give --key and "
            "--allow; or, on a network you trust, insecure=true."
        )
        raise refuse("--listen", listen, "a loopback address", fix)
    return host, int(port)


def with_run_id(config: SyncerConfig, run_id: str) -> SyncerConfig:
    """The same settings under a run id."""
    return msgspec.structs.replace(config, run_id=run_id)


def _read(file: Path) -> Any:
    if not file.is_file():
        raise refuse("--config", str(file), "an existing YAML file")
    try:
        found = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise refuse("--config", str(file), "YAML", str(error)) from error
    if not isinstance(found, dict | None):
        raise refuse("--config", str(file), "a mapping of settings")
    return found or {}


def _check_run_dir(run_dir: Path, resume: bool) -> None:
    syncer = run_dir / "syncer"
    if run_dir.exists() and not run_dir.is_dir():
        raise refuse("--run-dir", str(run_dir), "a folder, or a path where one can be made")
    if not resume and ((run_dir / TAPE).exists() or checkpoints(syncer)):
        fix = "To go on with that run, give --resume."
        raise refuse("--run-dir", str(run_dir), "a folder that holds no run yet", fix)
    if resume and not (syncer / LOCK).exists():
        fix = "Leave --resume out to start a run in an empty folder."
        raise refuse(
            "--run-dir", str(run_dir), "with --resume, a run whose syncer was started", fix
        )
    if resume and checkpoints(syncer) and newest_checkpoint(syncer) is None:
        fix = "All that are there are torn; put a whole one back, or start a run elsewhere."
        raise refuse("--run-dir", str(run_dir), "with --resume, a run with a whole checkpoint", fix)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, like every other wrong setting; argparse would print its usage."""
        raise ValueError(f"{self.prog}: {message} (--help lists what is allowed)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dd-lightning syncer",
        description="Run the syncer of one run; learners dial in. Prints one JSON line with its "
        "address once it can be reached, and ends with the run.",
    )
    add = parser.add_argument
    add("--listen", default="tcp://127.0.0.1:0", help="tcp://HOST:PORT; port 0: any free one")
    add("--run-dir", type=Path, required=True, help="folder of the run")
    add("--config", type=Path, help="YAML file of settings (the keys of SyncerConfig)")
    add("--key", type=Path, metavar="FILE", help="syncer.key of `dd-lightning keys new`")
    add("--allow", type=Path, metavar="FILE|DIR", help="allowed.yaml beside it: who may come in")
    add("--resume", action="store_true", help="go on from the newest whole checkpoint")
    add("--cut", metavar="ID", help="with --resume: restore the whole run from this cut instead")
    add(
        "--logger",
        action="append",
        default=[],
        metavar="NAME[={...}]",
        help="aim, tensorboard or wandb, with settings as 'aim={repo: DIR}'; may be repeated",
    )
    add("settings", nargs="*", help="key=value, such as algorithm=short_run learners=4")
    return parser
