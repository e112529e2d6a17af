"""Claims about pruning: idle adapters are removed from the lowest layer up, and the new package passes its audit."""

from __future__ import annotations

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.errors import ConfigError, InputError
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.studies import pruning
from adapterbank.studies.pruning import describe, find_idle
from adapterbank.training import dataset
from small_data import FAST, reviews, write


def test_layers_are_removed_from_the_lowest_up_while_the_total_loss_is_within_the_tolerance():
    scores = {(): 0.900, (0,): 0.898, (0, 1): 0.880, (0, 2): 0.896, (0, 2, 3): 0.8949}
    found = find_idle(lambda removed: scores[removed], (0, 1, 2, 3), tolerance=0.5)
    assert found["removed"] == [0, 2]
    assert (found["before"], found["after"]) == (0.900, 0.896)
    assert [step["removed"] for step in found["steps"]] == [True, False, True, False]


def test_the_removed_layers_are_described_with_the_scores():
    found = {"from": "s@1", "metric": "accuracy", "removed": [0, 2], "before": 0.9, "after": 0.896, "tolerance": 0.5}
    assert describe(found) == "Without the adapters of layers 0, 2: accuracy 0.9000 before, 0.8960 after."
    assert describe({**found, "removed": []}).startswith("No adapter of s@1 is idle")


@pytest.fixture
def bank(bert, tmp_path):
    bank = open_bank(tmp_path / "bank", bert)
    bank.train("s", reviews(), reviews(), **FAST)
    return bank


def test_the_pruned_package_passes_its_audit_and_has_the_score_of_the_ablation(bank):
    ablated = bank.ablate("s@1", reviews())
    found, result = bank.prune("s", reviews(), tolerance=100)
    assert found["removed"] == [0, 1, 2]
    expected = next(s for s in ablated["spans"] if (s["first"], s["last"]) == (0, 2))["scores"]["accuracy"]
    assert found["after"] == expected == bank.evaluate("s", reviews())["accuracy"]
    assert found["before"] == ablated["whole"]["accuracy"]
    assert result.package.ref == "s@2"
    assert all(finding.ok for finding in bank.audit())


def test_the_manifest_and_the_record_have_both_scores_and_fewer_parameters(bank, tmp_path):
    found, result = bank.prune("s", reviews(), tolerance=100)
    was, now = bank.show("s@1"), bank.show("s")
    assert now.method["adapter"]["layers"] == []
    assert now.recipe["pruned"]["before"] == was.metrics["dev"]["accuracy"]
    assert now.recipe["pruned"]["after"] == now.metrics["dev"]["accuracy"]
    gone = was.params["trained"] - now.params["trained"]
    assert gone == 3 * 2 * (2 * 4 * 32 + 32 + 4)
    assert was.params["total"] - now.params["total"] == gone
    assert now.bytes < was.bytes
    kept = records.read_all(tmp_path / "bank" / "records")
    assert len(kept) == 2
    assert next(r for r in kept if "pruned" in r)["pruned"] == found
    assert result.record["config"]["pruned"] == {"from": "s@1", "tolerance": 100}


def test_without_idle_adapters_there_is_no_new_version(bank, monkeypatch):
    manifest = bank.show("s")

    def each_is_needed(score, *rest):
        """Make each adapter worth more than any score: whether the tiny encoder needs one depends on rounding."""
        return find_idle(lambda removed: score(removed) - 2 * len(removed), *rest)

    monkeypatch.setattr(pruning, "find_idle", each_is_needed)
    found, result = bank.prune("s", reviews(), tolerance=0)
    assert found["removed"] == []
    assert result is None
    assert bank.show("s") == manifest


def test_a_missing_record_is_no_obstacle(bank, tmp_path):
    for path in (tmp_path / "bank" / "records").glob("*.json"):
        path.unlink()
    _, result = bank.prune("s", reviews(), tolerance=100)
    assert result.record["config"]["lr"] == FAST["lr"]


def test_train_prunes_on_the_data_of_the_run(bert, tmp_path):
    notes = []
    bank = open_bank(tmp_path / "bank", bert)
    result = bank.train("s", reviews(40), test=reviews(8), prune=True, tolerance=100, note=notes.append, **FAST)
    assert result.package.ref == "s@2"
    assert set(result.record["metrics"]) == {"dev", "test"}
    assert notes[-1].startswith("Without the adapters of layers 0, 1, 2: accuracy")
    assert Bank.open(tmp_path / "bank").get("s").manifest.version == 2


def test_a_run_and_its_pruning_read_the_data_once(bert, tmp_path, monkeypatch):
    read, real = [], dataset.table_from
    monkeypatch.setattr(dataset, "table_from", lambda source, *rest: read.append(source) or real(source, *rest))
    for name in ("train.csv", "dev.csv"):
        write(tmp_path / name, reviews())
    bank = open_bank(tmp_path / "bank", bert)
    bank.train("s", tmp_path / "train.csv", tmp_path / "dev.csv", prune=True, tolerance=100, **FAST)
    assert read == [str(tmp_path / "train.csv"), str(tmp_path / "dev.csv")]


def test_a_task_that_cannot_be_pruned_is_reported(bert, tmp_path):
    bank = open_bank(tmp_path / "bank", bert)
    bank.train("s", reviews(), reviews(), **{**FAST, "size": 64, "method": "layernorm"})
    with pytest.raises(InputError, match="'layernorm', which has no adapters"):
        bank.prune("s", reviews())
    with pytest.raises(ConfigError, match="tolerance is -1"):
        bank.prune("s", reviews(), tolerance=-1)
