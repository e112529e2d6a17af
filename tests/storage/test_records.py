"""Claims about `adapterbank.storage.records`: one JSON file per run, never edited."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapterbank.errors import DataError, InputError
from adapterbank.storage import records


def record(seed: int = 0, score: float = 0.5) -> dict[str, Any]:
    """Return a small record."""
    return {"config": {"task": "sst2", "seed": seed}, "metrics": {"validation": score}}


def test_the_hash_of_a_config_does_not_depend_on_the_order_of_its_keys() -> None:
    assert records.config_hash({"a": 1, "b": [2, 3]}) == records.config_hash({"b": (2, 3), "a": 1})
    assert records.config_hash({"a": 1}) != records.config_hash({"a": 2})


def test_the_hash_of_a_config_stays_the_same_over_releases() -> None:
    # sha256 of '{"seed":1,"task":"sst2"}', from sha256sum.
    assert records.config_hash({"task": "sst2", "seed": 1}) == "8dbce56502225933"


def test_a_record_is_named_after_its_config_and_read_back_unchanged(tmp_path: Path) -> None:
    path = records.write(tmp_path / "records", record())
    assert path == tmp_path / "records" / f"{records.config_hash(record()['config'])}.json"
    assert records.read(path) == record()
    assert os.listdir(tmp_path / "records") == [path.name]


def test_a_repeated_config_gets_a_new_file_and_the_old_one_is_kept(tmp_path: Path) -> None:
    paths = [records.write(tmp_path, record(score=score)) for score in (0.1, 0.2, 0.3)]
    name = records.config_hash(record()["config"])
    assert [path.name for path in paths] == [f"{name}.json", f"{name}.2.json", f"{name}.3.json"]
    assert records.read(paths[0]) == record(score=0.1)


def test_records_of_one_config_written_at_once_are_all_kept(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda n: records.write(tmp_path, record(score=n)), range(16)))
    assert len(set(paths)) == 16
    assert [records.read(path)["metrics"]["validation"] for path in paths] == list(range(16))


def test_records_are_sorted_by_hash_and_then_by_number(tmp_path: Path) -> None:
    for seed, runs in ((1, 11), (2, 2), (3, 1)):
        for run in range(runs):
            records.write(tmp_path, record(seed, run))
    found = records.read_all(tmp_path)
    rows = [(records.config_hash(item["config"]), item["metrics"]["validation"]) for item in found]
    assert len(rows) == 14
    assert rows == sorted(rows)


def test_a_missing_folder_has_no_records(tmp_path: Path) -> None:
    assert records.read_all(tmp_path / "none") == []


def test_a_file_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".tmp-1.json").write_text("{")
    assert records.read_all(tmp_path) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"metrics": {}}', '{"config": NaN}', ""])
def test_a_damaged_record_is_named_with_a_remedy(tmp_path: Path, text: str) -> None:
    records.write(tmp_path, record())
    (tmp_path / "0123456789abcdef.json").write_text(text)
    with pytest.raises(DataError, match=r"0123456789abcdef\.json .*run its config again"):
        records.read_all(tmp_path)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no record .*x\.json"):
        records.read(tmp_path / "x.json")


@pytest.mark.parametrize("bad", [{"metrics": {}}, {"config": "sst2"}, {"config": {}, "loss": float("nan")}])
def test_a_record_without_config_or_with_nan_is_refused_and_nothing_is_written(
    tmp_path: Path, bad: dict[str, Any]
) -> None:
    with pytest.raises(InputError):
        records.write(tmp_path / "records", bad)
    assert not (tmp_path / "records").exists()


def test_a_run_is_found_by_the_hash_of_its_config(tmp_path: Path) -> None:
    path = records.write(tmp_path, record())
    records.write(tmp_path, record())
    assert records.find(tmp_path, records.config_hash(record()["config"])) == path
    assert records.find(tmp_path, "0" * 16) is None


@pytest.mark.parametrize("hash", ["", "abc", "../../etc/passwd", "*" * 16])
def test_a_value_that_is_not_a_hash_is_refused(tmp_path: Path, hash: str) -> None:
    with pytest.raises(InputError, match="not the hash of a config"):
        records.find(tmp_path, hash)


def test_a_folder_may_be_a_string(tmp_path):
    records.write(tmp_path, {"config": {"seed": 1}})
    assert records.read_all(str(tmp_path)) == [{"config": {"seed": 1}}]


def test_a_record_in_place_of_another_is_refused(tmp_path):
    first, second = (records.write(tmp_path, {"config": {"seed": seed}}) for seed in (1, 2))
    first.write_bytes(second.read_bytes())
    with pytest.raises(DataError, match="is the record of another config"):
        records.read(first)


def test_a_changed_record_is_refused_and_an_older_one_without_a_checksum_is_read(tmp_path):
    path = records.write(tmp_path, {"config": {"seed": 1}, "score": 0.75})
    assert records.read(path) == {"config": {"seed": 1}, "score": 0.75}
    path.write_text(path.read_text().replace("0.75", "0.95"))
    with pytest.raises(DataError, match="was changed after it was written"):
        records.read(path)
    path.write_text('{"config": {"seed": 1}, "score": 0.75}')
    assert records.read(path)["score"] == 0.75
