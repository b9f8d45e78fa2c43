"""Key files: what is made, who can read it, and what is said about one that is no good."""

import json
import os

import pytest

from dd_lightning.cli import main
from dd_lightning.learner.address import identify
from dd_lightning.syncer.settings import parse
from dd_lightning.transport.keys import (
    ALLOWED_FILE,
    LEARNER,
    OPERATOR,
    SYNCER_FILE,
    add_keys,
    key_file,
    load_dial_keys,
    load_syncer_keys,
    new_keys,
    read_allowed,
)

pytestmark = pytest.mark.unit
ADDRESS = "tcp://127.0.0.1:29400"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "keys"
    new_keys(folder, ["0", "eu/1"], "ada")
    return folder


def test_the_files_of_a_run_belong_together(folder):
    syncer = load_syncer_keys(folder / SYNCER_FILE, folder / ALLOWED_FILE)
    dialing = [
        load_dial_keys(key_file(folder, kind, name))
        for kind, name in ((LEARNER, "0"), (LEARNER, "eu/1"), (OPERATOR, "ada"))
    ]
    assert {keys.syncer for keys in dialing} == {syncer.public}
    assert {keys.fingerprint for keys in dialing} == {syncer.fingerprint}
    expected = {keys.public: f"{keys.kind} {keys.name}" for keys in dialing}
    assert read_allowed(folder / ALLOWED_FILE) == read_allowed(folder) == expected
    assert len({syncer.public, *expected}) == 4


def test_secrets_are_readable_by_their_user_alone_and_not_shown(folder):
    secrets = sorted(folder.glob("*.key"))
    assert len(secrets) == 4
    for path in secrets:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text().startswith("# SECRET")
    keys = load_dial_keys(key_file(folder, LEARNER, "0"))
    assert keys.secret.decode() not in repr(keys)
    assert keys.secret.decode() not in (folder / ALLOWED_FILE).read_text()
    identity = identify(ADDRESS, "0", str(secrets[0]))
    assert keys.secret.decode() not in repr(identity)


def test_a_learner_is_added_and_nothing_is_overwritten(tmp_path):
    new_keys(tmp_path, ["0"], "operator")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"syncer\.key is there already.*never overwritten"):
        new_keys(tmp_path, ["1"], "operator")
    with pytest.raises(ValueError, match=r"learner-0\.key is there already"):
        add_keys(tmp_path, ["1", "0"])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    add_keys(tmp_path, ["1"])
    added = load_dial_keys(key_file(tmp_path, LEARNER, "1"))
    allowed = read_allowed(tmp_path)
    assert (len(allowed), allowed[added.public]) == (3, "learner 1")
    assert added.syncer == load_syncer_keys(tmp_path / SYNCER_FILE, tmp_path).public


def damaged(folder, tmp_path, old, new):
    path = tmp_path / "damaged.key"
    path.touch(0o600)
    path.write_text(key_file(folder, LEARNER, "0").read_text().replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("'learner'", "'syncer'", "is of kind 'syncer'; allowed here: learner | operator"),
        ("'secret': '", "'secret': 'xx", "'secret' in .* is no key; allowed: 40 characters"),
        ("'syncer'", "'sincer'", "'syncer' in .* is no key"),
        ("'public': '", "'public': '#####' #", "'public' in .* is no key"),
        ("'kind'", "\t: [", "is no YAML"),
    ],
)
def test_a_damaged_key_file_teaches(folder, tmp_path, old, new, said):
    path = damaged(folder, tmp_path, old, new)
    with pytest.raises(ValueError, match=said.replace("|", r"\|")) as caught:
        load_dial_keys(path)
    assert load_dial_keys(key_file(folder, LEARNER, "0")).secret.decode() not in str(caught.value)


def test_halves_of_two_pairs_are_refused(folder, tmp_path):
    mine, other = (load_dial_keys(key_file(folder, LEARNER, name)) for name in ("0", "eu/1"))
    path = damaged(folder, tmp_path, mine.public.decode(), other.public.decode())
    with pytest.raises(ValueError, match="do not belong together"):
        load_dial_keys(path)


def test_a_secret_that_others_can_read_is_refused(folder, tmp_path):
    path = damaged(folder, tmp_path, "", "")
    os.chmod(path, 0o640)
    with pytest.raises(ValueError, match=f"can be read or written by others.*chmod 600 {path}"):
        load_dial_keys(path)


def test_a_wrong_allow_list_teaches(folder, tmp_path):
    with pytest.raises(ValueError, match=r"a folder without \*\.yaml"):
        load_syncer_keys(folder / SYNCER_FILE, tmp_path)
    with pytest.raises(ValueError, match="is no allow-list"):
        load_syncer_keys(folder / SYNCER_FILE, key_file(folder, LEARNER, "0"))
    with pytest.raises(ValueError, match="cannot be read"):
        load_syncer_keys(folder / SYNCER_FILE, tmp_path / "missing")
    with pytest.raises(ValueError, match="of kind 'learner'; allowed here: syncer"):
        load_syncer_keys(key_file(folder, LEARNER, "0"), folder)


def test_off_loopback_needs_keys_or_insecure(folder, tmp_path):
    arguments = ["--run-dir", str(tmp_path / "run"), "--listen", "tcp://0.0.0.0:0"]
    keys = ["--key", str(folder / SYNCER_FILE), "--allow", str(folder)]
    with pytest.raises(ValueError, match=r"--listen is .*keys new.*insecure=true"):
        parse(arguments)
    assert parse([*arguments, "insecure=true"]).keys is None
    assert parse([*arguments, *keys]).keys is not None
    with pytest.warns(UserWarning, match="insecure: true has no effect"):
        parse([*arguments, *keys, "insecure=true"])
    for half in (keys[:2], keys[2:]):
        with pytest.raises(ValueError, match=r"--(key|allow) is None.*together with"):
            parse([*arguments, *half])


def test_the_command_makes_them_and_says_where_they_go(tmp_path, capsys):
    folder = tmp_path / "keys"
    options = ["--dir", str(folder), "--learners", "0,1", "--learner", "far, away", "--json"]
    assert main(["keys", "new", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert sorted(said["files"]) == sorted(path.name for path in folder.iterdir())
    assert said["learners"] == ["0", "1", "far, away"]
    keys = load_dial_keys(key_file(folder, LEARNER, "far, away"))
    assert said["fingerprint"] == keys.fingerprint
    assert main(["keys", "new", *options]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert main(["keys", "add", "--dir", str(folder), "--learner", "2"]) == 0
    text = capsys.readouterr().out
    assert f"{folder}/learner-2.key" in text and "dd-lightning syncer --key" in text
    assert main(["keys", "add", "--dir", str(folder), "--learner", "a\tb"]) == 2
    assert main(["keys", "new", "--dir", str(tmp_path / "b"), "--learners", "0,0"]) == 2
