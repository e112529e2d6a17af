"""Claims about `ablate`, `prune` and `train --size auto`: what the shell shows, and the mistakes it tells."""

from __future__ import annotations

import csv
import io

import pytest

from adapterbank.api import open_bank
from adapterbank.studies import size_search
from small_data import FAST, flags, reviews, shell, write


@pytest.fixture
def here(tmp_path, monkeypatch, bert):
    write(tmp_path / "train.csv", reviews())
    monkeypatch.chdir(tmp_path)
    open_bank("bank", bert).train("s", "train.csv", "train.csv", **FAST)
    return tmp_path


def on_s(command, *words):
    return shell(command, "--bank", "bank", "--task", "s", "--data", "train.csv", *words)


def test_ablate_prints_a_matrix_of_first_and_last_layers(here):
    found = on_s("ablate")
    assert found.code == 0
    assert found.out.startswith("s@1 on 24 rows, 6 spans")
    table = [line.split() for line in found.out.splitlines()[3:]]
    assert table[0] == ["first", "0", "1", "2"]
    assert [len(row) for row in table[1:]] == [4, 3, 2]


def test_ablate_as_csv_and_json_say_the_same(here):
    rows = list(csv.DictReader(io.StringIO(on_s("ablate", "--csv").out)))
    spans = on_s("ablate", "--json").json["spans"]
    assert len(rows) == 1 + len(spans)
    assert [float(row["accuracy"]) for row in rows[1:]] == [span["scores"]["accuracy"] for span in spans]
    assert on_s("ablate", "--csv", "--json").code == 2


def test_prune_says_what_went_and_what_it_cost(here):
    found = on_s("prune", "--tolerance", 100)
    assert found.code == 0
    assert "Without the adapters of layers 0, 1, 2: accuracy" in found.out
    assert "s@2  " in found.out
    assert "parameters instead of" in found.out
    assert on_s("prune", "--json").json["package"] is None
    assert on_s("prune", "--tolerance", -1).code == 2


def test_a_task_without_any_adapter_left_is_told(here):
    on_s("prune", "--tolerance", 100)
    found = on_s("ablate")
    assert (found.code, found.err) == (
        2,
        "adapterbank: s@2 has no adapters left to remove; name an earlier version of the task.\n",
    )
    assert on_s("prune").out.splitlines()[-1] == "s@2 has no adapters left to remove."


def test_a_damaged_record_is_told_before_a_version_is_made_without_one(here):
    (here / "bank" / "records" / "0123456789abcdef.json").write_text("{")
    found = on_s("prune", "--tolerance", 100)
    assert (found.code, "0123456789abcdef.json is not JSON" in found.err) == (2, True)
    assert not (here / "bank" / "tasks" / "s" / "2").exists()


def test_a_config_file_may_ask_for_an_automatic_size(here, monkeypatch):
    monkeypatch.setattr(size_search, "SIZES", (2, 4))
    options = {name: value for name, value in FAST.items() if name != "size"}
    (here / "auto.yaml").write_text("size: auto\ntask: a\ntrain: train.csv\n")
    found = shell("train", "--bank", "bank", "--config", "auto.yaml", *flags(options))
    assert found.code == 0, found
    assert "rung 3 of 3" in found.err
    assert (
        shell("train", "--bank", "bank", "--config", "auto.yaml", "--size", "2", *flags(options)).err.count("rung") == 0
    )


def test_train_with_an_automatic_size_says_why(here, monkeypatch):
    monkeypatch.setattr(size_search, "SIZES", (2, 4))
    options = {name: value for name, value in FAST.items() if name != "size"}
    words = ["train", "--bank", "bank", "--task", "a", "--train", "train.csv", *flags(options)]
    found = shell(*words, "--size", "auto", "--tolerance", 100, "--prune")
    assert found.code == 0, found
    assert "rung 3 of 3" in found.err
    assert "Size 2 (lr 0.01)" in found.err
    assert "Without the adapters of layers" in found.err
    assert found.out.startswith("a@2  accuracy")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tolerance", "1"], "neither --size auto nor --prune"),
        (["--size", "auto", "--tolerance", "much"], "tolerance is 'much'"),
        (["--size", "auto", "--tolerance", "-1"], "at least 0"),
        (["--size", "auto", "--resume"], "cannot be resumed"),
        (["--size", "automatic"], "size is 'automatic'"),
    ],
)
def test_mistakes_of_automatic_size_are_one_sentence(here, words, told):
    found = shell("train", "--bank", "bank", "--task", "a", "--train", "train.csv", *words)
    assert found.code == 2
    assert told in found.err
    assert len(found.err.strip().splitlines()) == 1


def test_show_tells_what_was_pruned(here):
    on_s("prune", "--tolerance", 100)
    line = next(line for line in shell("show", "--bank", "bank", "--task", "s").out.splitlines() if "pruned" in line)
    assert "s@1 without the adapters of layers 0, 1, 2: accuracy" in line
