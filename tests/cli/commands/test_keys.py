"""`adapterbank keys`: a key is shown once, listed without its secret, revoked by name."""

from __future__ import annotations

import pytest

from adapterbank.serving.http.auth import Keys
from small_data import shell


@pytest.fixture
def here(bank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words):
    return shell(*words.split())


def test_only_the_secret_is_on_standard_output_and_it_is_valid_for_the_bank(here):
    found = run("keys add --bank bank --name alice --scope predict --scope train --task sentiment --rate 60")
    assert found.code == 0
    assert found.err == "This is the secret of the key 'alice'. It is not stored and cannot be shown again.\n"
    key = Keys(here / "bank" / "keys.json").check(found.out.strip())
    assert (key.scopes, key.tasks, key.rate) == (("predict", "train"), ("sentiment",), 60)


def test_keys_are_listed_without_their_secrets(here):
    assert "There are no keys yet." in shell("keys", "list", "--bank", "bank").out
    secret = run("keys add --bank bank --name a --scope admin --json").json["key"]
    run("keys add --bank bank --name b --scope predict --task glue/mrpc --task other --rate 5")
    listed = shell("keys", "list", "--bank", "bank")
    assert [line.split()[:4] for line in listed.out.splitlines()[1:]] == [
        ["a", "admin", "all", "any"],
        ["b", "predict", "glue-mrpc,other", "5"],
    ]
    assert secret not in listed.out
    as_json = shell("keys", "list", "--bank", "bank", "--json")
    assert [(key["name"], key["tasks"]) for key in as_json.json] == [("a", None), ("b", ["glue-mrpc", "other"])]
    assert "sha256" not in as_json.out


def test_a_revoked_key_is_gone(here):
    secret = run("keys add --keys mine.json --name a --scope predict").out.strip()
    assert run("keys revoke --keys mine.json --name a").out == "Revoked a.\n"
    assert Keys("mine.json").check(secret) is None
    again = run("keys revoke --keys mine.json --name a --json")
    assert (again.code, again.out) == (2, "")
    assert "'a' is not a key of mine.json." in again.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("keys add --name a --scope predict", "give --bank FOLDER or --keys FILE."),
        ("keys add --bank nowhere --name a --scope predict", "nowhere does not exist"),
        ("keys add --bank bank --name a --scope root", "'root' is not a scope."),
        ("keys add --bank bank --name a", "--scope"),
        ("keys add --bank bank --name a --scope predict --rate 0", "rate is 0"),
        ("keys revoke --bank bank --name a", "'a' is not a key of"),
        ("keys lsit --bank bank", "lsit"),
    ],
)
def test_a_mistake_is_one_line(here, words, message):
    found = run(words)
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert found.err.count("\n") == 1
    assert not (here / "nowhere").exists()


@pytest.mark.parametrize("words", [[], ["add"], ["list"], ["revoke"]])
def test_every_command_explains_itself_with_an_example(words):
    found = shell("keys", *words, "--help")
    assert (found.code, found.err) == (0, "")
    assert f"Example: adapterbank keys {(words or ['add'])[0]}" in " ".join(found.out.split())
