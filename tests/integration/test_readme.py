"""The README: its script runs as printed, its commands exist, its links lead somewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.cli import COMMANDS
from dd_lightning.cli import main as dd_lightning
from dd_lightning.launch.settings import check
from dd_lightning.syncer.checkpoint import load_parameters, newest_checkpoint
from dd_lightning.syncer.settings import parse

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ADDRESS = "tcp://127.0.0.1:29400"
RUN_S = 90.0
END_S = 5.0


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands():
    """Each command line that the README prints, as words, without comments and environment."""
    lines = "".join(fenced("bash")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [[w for w in line if not re.match(r"[A-Z]+=", w)] for line in words if line]


def commands_of(*names):
    """The arguments of those whose program is one of the names."""
    found = [line for line in commands() if Path(line[0]).name == names[0]]
    return [line[len(names) :] for line in found if tuple(line[1 : len(names)]) == names[1:]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The README's script with two learners and its syncer, at a free port; the folder."""
    folder = tmp_path_factory.mktemp("readme")
    (script,) = fenced("python")
    [arguments] = commands_of("dd-lightning", "syncer")
    assert ADDRESS in script and ADDRESS in arguments
    arguments[arguments.index(ADDRESS)] = "tcp://127.0.0.1:0"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment = {k: v for k, v in environment.items() if not k.startswith("DD_")}
    started = []

    def start(name, *command, **options):
        with open(folder / f"{name}.log", "w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=folder,
                    env=environment,
                    stderr=log,
                    text=True,
                    **options,
                )
            )
        return started[-1]

    try:
        syncer = start("syncer", "-m", "dd_lightning.cli", "syncer", *arguments, stdout=-1)
        address = json.loads(syncer.stdout.readline())["listening"]
        (folder / "train.py").write_text(script.replace(ADDRESS, address))
        for learner in [line[2] for line in commands() if line[:2] == ["python", "train.py"]]:
            start(learner, "train.py", learner, stdout=subprocess.DEVNULL)
        codes = [process.wait(RUN_S) for process in started]
        said = "".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
        assert codes == [0, 0, 0], said
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(END_S)
        syncer.stdout.close()
    return folder


@pytest.mark.timeout(RUN_S + 30)
def test_the_script_runs_as_printed(run):
    summary = json.loads((run / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert sorted(summary["per_learner"]) == ["0", "1"]
    assert all(one["tokens_merged"] > 0 for one in summary["per_learner"].values())
    assert summary["merges_per_fragment"]["min"] >= 8


def test_the_exported_model_has_the_loss_of_theta(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(run)
    import train

    theta = newest_checkpoint(run / "run" / "syncer", verify=True)
    [arguments] = commands_of("dd-lightning", "export")
    out = tmp_path / arguments[arguments.index("--out") + 1]
    arguments[arguments.index("--out") + 1] = str(out)
    assert re.fullmatch(r"run/syncer/step-1-\d+\.ckpt", arguments[0])
    assert dd_lightning(["export", str(theta), *arguments[1:]]) == 0
    exported = train.Model.load_from_checkpoint(out)
    by_hand = train.Model()
    by_hand.load_state_dict(load_parameters(theta))
    losses = [held_out_loss(model) for model in (exported, by_hand)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] < 0.2 * held_out_loss(train.Model())


def held_out_loss(model):
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return model.training_step((x, x.sin().sum(1, keepdim=True)), 0).item()


def test_every_command_exists():
    makefile = (ROOT / "Makefile").read_text()
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(commands()) >= 10
    for program, *rest in commands():
        if program == "make":
            assert f"\n{rest[0]}:" in makefile, rest
        elif Path(program).name == "dd-lightning":
            assert "dd-lightning" in entry_points and rest[0] in COMMANDS, rest
        else:
            assert Path(program).name == "python", program
            assert rest[0] == "train.py" or (ROOT / rest[0]).is_file(), rest


@pytest.mark.parametrize("arguments", commands_of("dd-lightning", "launch"), ids=" ".join)
def test_every_launch_composes_and_is_accepted(arguments):
    overrides = [one for one in arguments if one != "-m" and not one.startswith("hydra")]
    lowest = [re.sub(r"=interval\(([^,]+),.*\)$", r"=\1", one) for one in overrides]
    choices = [one.partition("=") for one in lowest]
    assert overrides
    sweeps = "-m" in arguments
    for values in product(*(value.split(",") if sweeps else [value] for _, _, value in choices)):
        job = [f"{key}={value}" for (key, _, _), value in zip(choices, values, strict=True)]
        with initialize_config_module("dd_lightning.conf", version_base="1.3"):
            config = compose("config", job)
        check(OmegaConf.to_container(config, resolve=True))


def test_the_syncers_settings_are_accepted(tmp_path):
    [arguments] = commands_of("dd-lightning", "syncer")
    arguments[arguments.index("--run-dir") + 1] = str(tmp_path / "run")
    config = parse(arguments).config
    assert (config.learners, config.algorithm.fragments) == (2, 4)


@pytest.mark.parametrize(
    "script", sorted({line[1] for line in commands() if line[1].startswith("scripts/")})
)
def test_every_script_knows_the_options_it_is_given(script):
    given = {w for line in commands() if script in line for w in line if w.startswith("--")}
    source = (ROOT / script).read_text()
    assert all(f'"{option}"' in source for option in given)


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_file_tree_is_true_and_whole():
    (tree,) = [block for block in fenced("text") if "dd_lightning/algorithm/" in block]
    entries = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    assert all((ROOT / entry).exists() for entry in entries)
    packages = {str(p.parent.relative_to(ROOT)) for p in ROOT.glob("dd_lightning/*/__init__.py")}
    scripts = {str(path.relative_to(ROOT)) for path in ROOT.glob("scripts/*.py")}
    assert packages | scripts <= entries


def test_every_choice_of_a_group_is_listed():
    for group in ("algorithm", "network", "logger", "experiment", "task"):
        row = next(line for line in README.splitlines() if line.startswith(f"| `{group}` |"))
        choices = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert choices <= set(re.findall(r"`(\w+)`", row)), group
