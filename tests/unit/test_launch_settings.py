"""Wrong settings are refused by name before anything starts."""

import socket

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch.learner_kind import step_floor_s
from dd_lightning.launch.settings import check, learner_values, named
from dd_lightning.launch.task import check_task

pytestmark = pytest.mark.unit


def resolved(*overrides):
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


WRONG = [
    ("learners=0", "learners is 0; allowed: an integer >= 1"),
    ("learners=two", "learners is 'two'"),
    ("learners=201", "allowed: 1 to 200"),
    ("seed=-1", "seed is -1"),
    ("mode=other", "mode is 'other'; allowed: processes \\| simulate"),
    ("trainer.max_steps=-5", "trainer.max_steps is -5"),
    ("algorithm.quorum=0", "algorithm.quorum is 0"),
    ("algorithm.quorum=5", r"algorithm.quorum is 5; allowed: 1 to 4"),
    ("algorithm.fragments=0", "algorithm.fragments is 0"),
    ("algorithm.sync_every=-24", "algorithm.sync_every is -24"),
    ("algorithm.overlap=-1", "algorithm.overlap is -1"),
    ("algorithm.merge=median", r"algorithm.merge is 'median'; allowed: "),
    ("algorithm.codec=gzip", r"algorithm.codec is 'gzip'; allowed: "),
    ("algorithm.fragmentation=odd", r"algorithm.fragmentation is 'odd'; allowed: "),
    ("algorithm.outer.lr=-1", r"algorithm.outer.lr is -1"),
    ("algorithm.outer.momentum=1", r"algorithm.outer.momentum is 1"),
    ("algorithm.max_learners=2", "algorithm.max_learners is 2; allowed: at least learners = 4"),
    ("timeouts.lease=1", "timeouts.lease is 1"),
    ("evaluate.every_s=0", "evaluate.every_s is 0; allowed: seconds > 0"),
    ("checkpoint.every_s=-1", "checkpoint.every_s is -1"),
    ("checkpoint.keep=0", "checkpoint.keep is 0"),
    ("budget.tokens=0", "budget.tokens is 0; allowed: an integer >= 1, or null"),
    ("launcher.step_floor_s=-0.1", "launcher.step_floor_s is -0.1; allowed: seconds >= 0"),
    ("launcher.max_restarts=-1", "launcher.max_restarts is -1"),
    ("launcher.threads_per_process=0", "launcher.threads_per_process is 0"),
    ("+simulate.speed=2", "simulate.speed is 2, but it is not a setting.*Did you mean"),
    ("launcher.listen=127.0.0.1:0", "launcher.listen is '127.0.0.1:0'; allowed: tcp://HOST:PORT"),
    ("launcher.listen='tcp://0.0.0.0:0'", "allowed: an address 127.x.x.x"),
    ("+launcher.nodes=2", "launcher.nodes is 2, but it is not a setting"),
    ("learner.devices=2", "learner.devices is 2; allowed: 1 under learner=single"),
    ("learner.name=zero", r"learner.name is 'zero'; allowed: single \| ddp \| fsdp \| fsdp2"),
    ("learner.step_floor_s=-1", "learner.step_floor_s is -1; allowed"),
    ("learner.validate_global=true", "learner.validate_global is True, but trainer.limit_val_batc"),
    ("learner.validate_global=2", "learner.validate_global is 2; allowed: false .* true"),
    ("learner.overrides={1: {learner: {devices: 2}}}", "learner.overrides.1: learner.devices is 2"),
    ("learner.overrides={9: {}}", "learner.overrides.9 is .* not a setting; allowed: 0, 1, 2, 3"),
    ("learner.overrides={1: 3}", "learner.overrides.1 is 3; allowed: a mapping"),
    ("learner.overrides={1: {seed: 3}}", "learner.overrides.1.seed"),
    ("+trainer.max_step=3", "trainer.max_step is 3.*Did you mean trainer.max_steps"),
    ("trainer.precision=17", "trainer is .*refused by Lightning: Precision"),
    ("network.bandwidth_scale=0", "network.bandwidth_scale=0"),
    ("task.module.gpt.heads=7", "task.module: .*heads"),
    ("task.data.batch_size=0", "task.data.batch_size is 0"),
    ("task.data.source=web", "task.data.source is 'web'"),
    ("+task.data.pages=3", "task.data has no pages"),
]


@pytest.mark.parametrize(("override", "said"), WRONG, ids=[override for override, _ in WRONG])
def test_a_wrong_setting_is_named_with_what_is_allowed(override, said):
    with pytest.raises(ValueError, match=said):
        settings = check(resolved(override))
        check_task(settings.values, settings.syncer.num_data_slots)


def test_a_learners_own_step_floor():
    own = "learner.overrides={1: {learner: {step_floor_s: 0.2}}}"
    values = check(resolved(own, "launcher.step_floor_s=0.1")).values
    assert [step_floor_s(learner_values(values, one)) for one in "01"] == [0.1, 0.2]
    with pytest.raises(ValueError, match=r"overrides\.1: .*at least launcher\.step_floor_s = 0\.3"):
        check(resolved(own, "launcher.step_floor_s=0.3"))
    with pytest.raises(ValueError, match=r"null under mode=simulate, where\s+simulate\.speeds"):
        check(resolved(own, "mode=simulate"))


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"tcp://127\.0\.0\.1:{port}.*cannot be listened on"):
            check(resolved(f"launcher.listen='tcp://127.0.0.1:{port}'"))


def test_the_syncer_gets_the_settings():
    config = check(
        resolved(
            "algorithm=streaming",
            "algorithm.fragments=7",
            "timeouts.lease=11",
            "budget.tokens=1000",
            "checkpoint={every_s: 5, keep: 2}",
            "network=lan",
            "trainer.max_steps=77",
            "seed=3",
        )
    ).syncer
    assert (config.algorithm.fragments, config.algorithm.preset) == (7, "streaming")
    assert (config.timeouts.lease, config.budget_tokens) == (11, 1000)
    assert (config.checkpoint_every_s, config.checkpoint_keep) == (5, 2)
    assert (config.max_steps, config.seed, config.learners) == (77, 3, 4)
    assert config.proxied and config.quorum == 4


def test_overrides_reach_their_learner_only():
    override = "learner.overrides={1: {trainer: {max_steps: 7}, task: {data: {batch_size: 2}}}}"
    values = check(resolved(override)).values
    assert learner_values(values, "0") == values
    own = learner_values(values, "1")
    assert (own["trainer"]["max_steps"], own["task"]["data"]["batch_size"]) == (7, 2)
    assert own["trainer"]["precision"] == values["trainer"]["precision"]
    assert values["trainer"]["max_steps"] != 7


def test_wrong_overrides_of_a_learner_are_refused_before_the_run():
    override = "learner.overrides={1: {task: {data: {batch_size: 0}}}}"
    settings = check(resolved(override))
    with pytest.raises(ValueError, match=r"task\.data\.batch_size is 0"):
        check_task(settings.values, settings.syncer.num_data_slots)


def test_a_run_whose_processes_are_started_again_waits_for_them():
    assert check(resolved()).syncer.timeouts.rejoin == 10
    settings = check(resolved("launcher.max_restarts=2", "launcher.restart_after_s=3"))
    assert settings.max_restarts == 2
    assert settings.syncer.timeouts.rejoin == 63 == settings.values["timeouts"]["rejoin"]
    longer = check(resolved("launcher.max_restarts=2", "timeouts.rejoin=100"))
    assert longer.syncer.timeouts.rejoin == 100


def test_a_shorter_wait_that_has_no_effect_is_said():
    with pytest.warns(UserWarning, match=r"timeouts\.rejoin=20 has no effect.* = 61 s"):
        check(resolved("launcher.max_restarts=2", "timeouts.rejoin=20"))


def test_restarts_are_an_integer_or_auto():
    assert check(resolved()).max_restarts == 0  # auto, and nobody is killed
    with pytest.raises(ValueError, match=r"launcher\.max_restarts is 'all'; allowed: .*or auto"):
        check(resolved("launcher.max_restarts=all"))


NO_EFFECT = [
    (["simulate.speeds=[1,0.5]"], "simulate.speeds: no effect under mode=processes"),
    (["simulate.joins={1: 3}", "simulate.jitter=0.1"], "simulate.joins, simulate.jitter: no eff"),
    (["mode=simulate", "launcher.step_floor_s=0.3"], "launcher.step_floor_s=0.3 has no effect"),
    (
        ["mode=simulate", "launcher.step_floor_s=0.3", "algorithm=data_parallel"],
        "launcher.step_floor_s=0.3 has no effect",
    ),
    (["mode=simulate", "simulate.distribution=normal"], "has no effect at simulate.jitter=0"),
    (["mode=simulate", "simulate.speeds=[1,1,1,1,2]"], "has 5 entries for 4 learners"),
]


@pytest.mark.parametrize(("overrides", "said"), NO_EFFECT)
def test_a_simulated_setting_without_effect_is_said(overrides, said):
    with pytest.warns(UserWarning, match=said):
        check(resolved(*overrides))


def test_a_trace_takes_the_place_of_a_distribution(tmp_path):
    (tmp_path / "steps.txt").write_text("0.1\n")
    given = ["mode=simulate", "simulate.distribution=normal", "simulate.jitter=0.1"]
    with pytest.warns(UserWarning, match=r"simulate.distribution, simulate.jitter: no effect"):
        check(resolved(*given, f"simulate.trace={tmp_path / 'steps.txt'}"))


def test_simulated_settings_that_act_are_taken_in_silence():
    check(resolved("experiment=smoke", "mode=simulate", "simulate.speeds=[1,0.5]"))


@pytest.mark.parametrize(
    ("experiment", "given", "shown"),
    [("demo", "null", "demo"), ("demo", "mine", "mine"), (None, "null", None)],
)
def test_aim_groups_runs_by_the_launched_experiment_unless_told_otherwise(experiment, given, shown):
    values = resolved("logger=[csv,aim]", f"logger.aim.experiment={given}")
    settings = check(named(values, experiment))
    assert settings.loggers == {"aim": {"repo": ".", "experiment": shown}}
