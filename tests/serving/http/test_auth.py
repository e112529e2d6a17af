"""Claims about API keys: only hashes on disk, scopes, tasks, immediate revocation, rates."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import threading

import pytest

from adapterbank.errors import InputError, StorageError, UnknownName
from adapterbank.serving.http.auth import PREFIX, Key, Keys, RateLimiter


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "keys.json")


def key(rate=None, **changes):
    return Key(
        **{"name": "a", "scopes": ("predict",), "tasks": None, "created": "", "sha256": "", **changes}, rate=rate
    )


def test_a_secret_opens_its_own_key_and_no_other_text_does(keys):
    first, second = keys.add("first", ["predict"]), keys.add("second", ["admin"])
    assert (keys.check(first).name, keys.check(second).name) == ("first", "second")
    for wrong in ("", PREFIX, first[:-1], first + "x", first.swapcase(), f" {first}", "ü\udc80"):
        assert keys.check(wrong) is None


def test_a_secret_is_256_random_bits_behind_a_known_prefix(keys):
    made = [keys.add(f"k{i}", ["predict"]) for i in range(20)]
    assert len(set(made)) == 20
    assert all(secret.startswith("abk_") and len(secret) == 4 + 43 for secret in made)


def test_the_file_contains_no_secret_and_only_its_owner_can_read_it(keys):
    before = os.umask(0)
    try:
        secret = keys.add("a", ["predict"])
    finally:
        os.umask(before)
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    text = keys.path.read_text()
    assert secret not in text
    assert secret.removeprefix(PREFIX) not in text
    assert "sha256" not in repr(keys.list()[0])
    assert set(keys.list()[0].to_json()) == {"name", "scopes", "tasks", "rate", "created"}


def test_a_change_by_another_process_is_seen_at_the_next_check(keys):
    secret, other = keys.add("a", ["predict"]), Keys(keys.path)
    assert other.check(secret)
    keys.revoke("a")
    assert other.check(secret) is None
    again = keys.add("a", ["predict"])
    assert other.check(again)
    keys.path.unlink()
    assert other.check(again) is None


def test_a_check_reads_the_file_only_when_it_has_changed(keys, monkeypatch):
    secret = keys.add("a", ["predict"])
    keys.check(secret)
    monkeypatch.setattr("adapterbank.storage.reading.read_checked", lambda path: pytest.fail("read again"))
    assert keys.check(secret)


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (["predict"], {"predict"}),
        (["train"], {"train"}),
        (["train", "predict"], {"predict", "train"}),
        (["admin"], {"predict", "train", "admin"}),
    ],
)
def test_a_scope_allows_itself_and_admin_allows_all(keys, scopes, allowed):
    found = keys.check(keys.add("a", scopes))
    assert {scope for scope in ("predict", "train", "admin") if found.allows(scope, "any")} == allowed


def test_a_key_for_some_tasks_allows_their_versions_and_their_names_in_the_catalog(keys):
    found = keys.check(keys.add("a", ["admin"], ["sentiment", "glue/mrpc"]))
    assert found.tasks == ("sentiment", "glue-mrpc")
    for task in ("sentiment", "sentiment@3", "glue/mrpc", "glue-mrpc@1", None):
        assert found.allows("predict", task)
    for task in ("sentiments", "glue/rte", "", "@", "sentiment/../other", "Sentiment"):
        assert not found.allows("predict", task)


@pytest.mark.parametrize(
    ("name", "scopes", "tasks", "rate", "message"),
    [
        ("", ["predict"], None, None, "cannot be the name of a key"),
        ("../x", ["predict"], None, None, "cannot be the name of a key"),
        ("a", [], None, None, "has no scope"),
        ("a", ["predict", "tarin"], None, None, "Did you mean 'train'?"),
        ("a", ["predict"], [], None, "omit the list for all"),
        ("a", ["predict"], ["../x"], None, "cannot be a task name"),
        ("a", ["predict"], ["sentiment@2"], None, "write 'sentiment'"),
        ("a", ["predict"], None, 0, "from 1 to 1000000 requests per minute"),
    ],
)
def test_an_invalid_key_is_refused_and_nothing_is_written(keys, name, scopes, tasks, rate, message):
    with pytest.raises(InputError, match=re.escape(message)):
        keys.add(name, scopes, tasks, rate)
    assert not keys.path.exists()


def test_names_of_keys_are_unique(keys):
    keys.add("a", ["predict"])
    with pytest.raises(InputError, match="There is a key 'a' already"):
        keys.add("a", ["train"])
    assert [one.scopes for one in keys.list()] == [("predict",)]


def test_revoking_an_unknown_key_suggests_known_ones(keys):
    keys.add("alice", ["predict"])
    with pytest.raises(UnknownName, match=r"Did you mean 'alice'\?"):
        keys.revoke("alise")


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"format": 2, "keys": []}',
        '{"format": 1, "keys": [{}]}',
        '{"format": 1, "keys": [{"name": "a", "scopes": ["admin"], "tasks": null, "rate": null, "created": "",'
        ' "sha256": ""}]}',
        '{"format": 1, "keys": [{"name": "a", "scopes": ["admin"], "tasks": "all", "rate": -1, "created": "",'
        f' "sha256": "{"0" * 64}"}}]}}',
    ],
)
def test_a_damaged_file_grants_no_access_and_is_reported(keys, content):
    secret = keys.add("a", ["admin"])
    keys.path.write_text(content)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"The key file .* cannot be read"):
            keys.check(secret)


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"name": "../x"},
        {"scopes": {"admin": 1}},
        {"scopes": "admin"},
        {"scopes": ["admin", "root"]},
        {"scopes": ["admin", "admin"]},
        {"scopes": []},
        {"tasks": "abc"},
        {"tasks": [1]},
        {"tasks": ["../x"]},
        {"rate": 10**4000},
        {"rate": 1_000_001},
        {"rate": True},
        {"rate": 1.5},
        {"created": 5},
        {"sha256": None},
        {"sha256": "0" * 63},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_key_that_could_not_have_been_added_is_refused_in_one_bounded_sentence(keys, change):
    secret = keys.add("a", ["admin"], rate=5)
    (row,) = json.loads(keys.path.read_text())["keys"]
    keys.path.write_text(json.dumps({"format": 1, "keys": [{**row, **change}]}))
    with pytest.raises(StorageError, match=r"The key file .* cannot be read") as refused:
        keys.check(secret)
    assert len(str(refused.value)) < 500


def test_a_file_with_two_keys_of_one_name_grants_no_access(keys):
    secret = keys.add("a", ["predict"], rate=1)
    (row,) = json.loads(keys.path.read_text())["keys"]
    keys.path.write_text(json.dumps({"format": 1, "keys": [row, {**row, "scopes": ["admin"], "sha256": "0" * 64}]}))
    with pytest.raises(StorageError, match="two keys have the same name"):
        keys.check(secret)


def test_keys_added_at_once_are_all_kept(keys):
    threads = [threading.Thread(target=Keys(keys.path).add, args=(f"k{i}", ["predict"])) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.name for one in keys.list()) == [f"k{i}" for i in range(8)]
    assert len(json.loads(keys.path.read_text())["keys"]) == 8


def test_a_rate_allows_ten_seconds_of_requests_at_once_and_then_the_rate():
    now = [100.0]
    pace, limited = RateLimiter(lambda: now[0]), key(rate=60)
    assert [pace.wait(limited) for _ in range(10)] == [0.0] * 10
    assert pace.wait(limited) == pytest.approx(1.0)
    let, times = 0, itertools.repeat(0.5, 120)
    for step in times:
        now[0] += step
        let += pace.wait(limited) == 0
    assert let == 60


def test_waiting_for_the_reported_time_is_enough():
    now = [0.0]
    pace, limited = RateLimiter(lambda: now[0]), key(rate=7)
    for _ in range(20):
        while (wait := pace.wait(limited)) > 0:
            now[0] += wait
    assert now[0] == pytest.approx((20 - 7 / 6) * 60 / 7)


def test_each_key_has_its_own_rate_and_none_means_no_limit():
    pace = RateLimiter(lambda: 0.0)
    slow = key(rate=1)
    assert pace.wait(slow) == 0
    assert pace.wait(slow) == pytest.approx(60)
    assert pace.wait(key(rate=1, name="b")) == 0
    assert [pace.wait(key(name="c")) for _ in range(1000)] == [0.0] * 1000
