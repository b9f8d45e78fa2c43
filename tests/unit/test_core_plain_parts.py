"""Parts of the core that hold: layout, tape, configuration."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from dd_lightning.protocol.config import AlgorithmConfig, SyncerConfig, Timeouts
from dd_lightning.protocol.layout import build_layout
from dd_lightning.protocol.messages import TensorInfo
from dd_lightning.protocol.tape import FIELDS, SCHEMA, TapeError, TapeWriter, read_tape

pytestmark = pytest.mark.unit
TENSORS = (
    TensorInfo("embed.weight", (8, 4), kind="embedding"),
    TensorInfo("block.weight", (4, 4)),
    TensorInfo("block.bias", (4,)),
    TensorInfo("norm.running_mean", (4,), kind="buffer", module="norm.weight"),
    TensorInfo("norm.weight", (4,)),
    TensorInfo("head.weight", (8, 4)),
)


# ---------------------------------------------------------------- layout


def test_every_tensor_is_in_one_fragment_and_buffers_follow_their_module() -> None:
    layout = build_layout(TENSORS, AlgorithmConfig(fragments=3))
    names = [name for fragment in layout.fragments for name in fragment]
    assert sorted(names) == sorted(tensor.name for tensor in TENSORS)
    home = next(f for f in layout.fragments if "norm.weight" in f)
    assert home[-1] == "norm.running_mean"
    assert sum(layout.elements()) == 32 + 16 + 4 + 4 + 32  # without the buffer
    assert layout.averaged == {"embed.weight", "head.weight"}


def test_buffers_stay_local_when_told() -> None:
    layout = build_layout(TENSORS, AlgorithmConfig(fragments=3, buffers=False))
    assert "norm.running_mean" not in {n for f in layout.fragments for n in f}


def test_fewer_tensors_than_fragments() -> None:
    with pytest.warns(UserWarning, match="only 5 trainable tensors: lowered to 5"):
        layout = build_layout(TENSORS, AlgorithmConfig(fragments=24))
    assert layout.num_fragments == 5 and all(layout.fragments)


def test_the_fingerprint_tells_layouts_apart_and_nothing_else() -> None:
    def of(tensors=TENSORS, **settings) -> str:
        return build_layout(tensors, AlgorithmConfig(**{"fragments": 3, **settings})).fingerprint

    assert of() == of() == of(sync_every=8, quorum=1)
    wider = (*TENSORS[:1], replace(TENSORS[1], shape=(4, 5)), *TENSORS[2:])
    assert len({of(), of(wider), of(fragments=2), of(average_tensors="norm")}) == 4


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (TENSORS, None),
        (tuple(reversed(TENSORS)), None),
        (TENSORS[1:], "it lacks embed.weight [8, 4]"),
        ((*TENSORS, TensorInfo("extra", (2,))), "it has extra [2], which the run's model lacks"),
        (
            (*TENSORS[:1], replace(TENSORS[1], shape=(4, 5)), *TENSORS[2:]),
            "its block.weight is parameter [4, 5], the run's is parameter [4, 4]",
        ),
    ],
)
def test_the_first_difference_in_words(tensors, said) -> None:
    assert build_layout(TENSORS, AlgorithmConfig(fragments=3)).difference(tensors) == said


@pytest.mark.parametrize(
    ("tensors", "said"),
    [((), "no trainable tensor"), ((TENSORS[1], TENSORS[1]), "one canonical name")],
)
def test_a_layout_that_cannot_be(tensors, said) -> None:
    with pytest.raises(ValueError, match=said):
        build_layout(tensors, AlgorithmConfig())


# ---------------------------------------------------------------- tape


def test_a_torn_line_is_cut_and_the_rest_read(tmp_path) -> None:
    path = tmp_path / "tape.jsonl"
    tape = TapeWriter(path)
    tape.write("warning", 1.0, text="one")
    tape.write("warning", 2.0, text="two", extra=float("nan"))
    tape.close()
    whole = path.read_bytes()
    for length in range(len(whole) - 20, len(whole)):
        path.write_bytes(whole[:length])
        assert [event["text"] for event in read_tape(path)] == ["one"]  # a reader skips it
        again = TapeWriter(path)
        again.write("warning", 3.0, text="three")
        again.close()
        assert [event["text"] for event in read_tape(path)] == ["one", "three"]
    path.write_bytes(whole)
    assert list(read_tape(path))[1] == {
        "event": "warning",
        "t_s": 2.0,
        "text": "two",
        "extra": None,
    }


def test_a_tape_without_a_newline_at_all_is_emptied(tmp_path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b'{"event":"run"' + b" " * 100_000)
    TapeWriter(path).close()
    assert path.read_bytes() == b""


def test_what_a_tape_refuses_to_write(tmp_path) -> None:
    tape = TapeWriter(tmp_path / "tape.jsonl")
    with pytest.raises(ValueError, match=r"'merged' is unknown; allowed: run, "):
        tape.write("merged", 1.0)
    with pytest.raises(ValueError, match="'lost' lacks fragment, tokens"):
        tape.write("lost", 1.0, learner="0", generation=1, cause="dead")
    tape.close()
    assert (tmp_path / "tape.jsonl").read_bytes() == b""
    assert all(fields for fields in FIELDS.values())


def test_what_a_tape_refuses_to_read(tmp_path) -> None:
    path = tmp_path / "tape.jsonl"
    path.write_text(json.dumps({"event": "run", "t_s": 0, "schema": SCHEMA + 1}) + "\n")
    with pytest.raises(TapeError, match=f"schema {SCHEMA + 1}; this version reads up to {SCHEMA}"):
        list(read_tape(path))
    path.write_text('{"event":"warning","t_s":0}\nnonsense\n')
    with pytest.raises(TapeError, match="line 2 is not JSON"):
        list(read_tape(path))


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"algorithm": {"fragments": 0}}, r"algorithm.fragments is 0; allowed: an integer >= 1"),
        ({"algorithm": {"sync_every": 1}}, r"algorithm.sync_every is 1; allowed: .* >= 2"),
        ({"algorithm": {"overlap": -1}}, r"algorithm.overlap is -1; allowed"),
        ({"algorithm": {"max_stale": 0}}, r"algorithm.max_stale is 0; allowed"),
        ({"algorithm": {"weights": "x"}}, r"algorithm.weights is 'x'; allowed: tokens \| uniform"),
        ({"algorithm": {"grace_rule": "x"}}, r"grace_rule is 'x'; allowed: lateness \| paper"),
        ({"algorithm": {"apply": "x"}}, r"algorithm.apply is 'x'; allowed: overwrite \| rebase"),
        ({"algorithm": {"wait": "x"}}, r"algorithm.wait is 'x'; allowed: never \| overlap"),
        ({"algorithm": {"on_lost_quorum": "x"}}, r"on_lost_quorum is 'x'; allowed: degrade"),
        ({"algorithm": {"quorum": 0}}, r"algorithm.quorum is 0; allowed: .* or all"),
        ({"algorithm": {"quorum": "most"}}, r"algorithm.quorum is 'most'; allowed"),
        ({"algorithm": {"quorum": "all"}}, r"algorithm.quorum is 'all'; .* learners=M"),
        ({"algorithm": {"quorum": 3}, "learners": 2}, r"algorithm.quorum is 3; allowed: 1 to 2"),
        ({"algorithm": {"mix_alpha": 1.5}}, r"algorithm.mix_alpha is 1.5; allowed: 0 .* to 1"),
        ({"algorithm": {"grace_safety": 0.0}}, r"algorithm.grace_safety is 0.0; allowed: above 0"),
        ({"algorithm": {"grace_cap": -1.0}}, r"algorithm.grace_cap is -1.0; allowed"),
        ({"algorithm": {"max_in_flight": 0}}, r"algorithm.max_in_flight is 0; allowed: .* auto"),
        ({"algorithm": {"min_learners": 0}}, r"algorithm.min_learners is 0; allowed"),
        ({"algorithm": {"min_learners": "all"}}, r"min_learners is 'all'; allowed: an integer"),
        ({"algorithm": {"min_learners": "most"}}, r"min_learners is 'most'; allowed: an integer"),
        ({"algorithm": {"min_learners": 4}, "learners": 2}, r"min_learners is 4; allowed: 1 to 2"),
        ({"algorithm": {"max_learners": 1}, "learners": 2}, r"max_learners is 1; .* learners = 2"),
        ({"algorithm": {"max_norm_ratio": 1.0}}, r"max_norm_ratio is 1.0; allowed: above 1"),
        ({"algorithm": {"average_tensors": "("}}, r"average_tensors is '\('; allowed: a regular"),
        ({"algorithm": {"preset": "papr"}}, r"algorithm.preset is 'papr'; allowed: .*paper"),
        ({"algorithm": {"fragmets": 3}}, r"algorithm.fragmets is not .* mean algorithm.fragments"),
        ({"algorithm": {"fragments": "3"}}, r"algorithm.fragments is '3'; expected `int`"),
        ({"learner": 3}, r"learner is not a setting; allowed: .*Did you mean learners"),
        ({"learners": 0}, r"learners is 0; allowed: an integer >= 1"),
        ({"budget_tokens": -5}, r"budget_tokens is -5; allowed"),
        ({"checkpoint_every_s": 0.0}, r"checkpoint_every_s.* all above 0"),
        ({"timeouts": {"lease": 4.0}}, r"timeouts.lease is 4.0; .*3·timeouts.heartbeat = 6.0"),
        ({"timeouts": {"round": 5.0}}, r"timeouts.round is 5.0; .*timeouts.lease = 10.0"),
        ({"timeouts": {"flush": 30.0}}, r"timeouts.flush is 30.0; .*timeouts.round = 60.0"),
        ({"timeouts": {"store": 0.0}}, r"timeouts.store is 0.0; allowed: seconds above 0"),
        ({"timeouts": {"laese": 9.0}}, r"timeouts.laese is not .* mean timeouts.lease"),
    ],
)
def test_a_refusal_names_setting_value_and_what_is_allowed(values, said) -> None:
    with pytest.raises(ValueError, match=said):
        SyncerConfig.load(values)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"sync_every": 4, "fragments": 4}, r"sync_every=4 is below 2·\(overlap\+1\)=6"),
        ({"fragments": 200}, r"fragments=200 is above 4·sync_every=96"),
        ({"mix_alpha": 0.3}, r"mix_alpha=0.3 has no effect under apply=overwrite"),
        ({"grace_rule": "none", "grace_cap": 3.0}, r"grace_cap has no effect"),
    ],
)
def test_cautions(algorithm, said) -> None:
    config = SyncerConfig.load({"algorithm": algorithm})
    with pytest.warns(UserWarning, match=said):
        config.warn()


def test_defaults_give_no_caution_and_survive_a_round_trip() -> None:
    config = SyncerConfig.load({})
    assert config == SyncerConfig() and config.cautions() == []
    assert SyncerConfig.load(config.to_dict()) == config
    assert SyncerConfig.load({"timeouts": None}).timeouts == Timeouts()


def test_what_is_derived() -> None:
    config = SyncerConfig.load({"learners": 5, "algorithm": {"quorum": "all"}})
    assert (config.quorum, config.min_learners, config.num_data_slots) == (5, 5, 5)
    assert SyncerConfig.load({}).num_data_slots == 64
