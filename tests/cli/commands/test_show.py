"""`adapterbank show`: everything that a package's manifest says."""

from __future__ import annotations

import json

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.storage.bank import Bank
from cli.invoke import on_task, run
from small_data import FAST, reviews, shell


@pytest.mark.parametrize("task", ["sentiment", "sentiment@1", "score", "tags", "pair", "span"])
def test_show_prints_the_manifest_line_by_line(here, task):
    found = run("show", "--task", task).out
    manifest = Bank.open("bank").get(task).manifest
    shown = {line[:12].strip(): line[13:] for line in found.splitlines()}
    assert shown["task"].startswith(f"{manifest.name}@{manifest.version}, {manifest.task['kind']}, reads ")
    assert shown["labels"] == (", ".join(manifest.task["labels"]) or "-")
    assert f"{manifest.task['metric']} " in shown["dev scores"]
    assert shown["trained"].startswith(f"{manifest.params['trained']:,} parameters")
    assert f"lr 0.01, epochs {manifest.recipe['epochs']}" in shown["recipe"]
    assert shown["recipe"].endswith(f"seed {manifest.seed}")
    assert shown["versions"] == ("1, 2, 3 (default)" if manifest.name == "sentiment" else "1 (default)")


def test_show_as_json_is_the_manifest(here):
    assert run("show", "--task", "score", "--json").json == json.loads(
        (here / "bank" / "tasks" / "score" / "1" / "manifest.json").read_text()
    )


def test_show_prints_what_was_pruned(one_task):
    on_task("prune", "--tolerance", 100)
    line = next(line for line in shell("show", "--bank", "bank", "--task", "s").out.splitlines() if "pruned" in line)
    assert "s@1 without the adapters of layers 0, 1, 2: accuracy" in line


def test_show_prints_the_temperature_and_the_thresholds(tmp_path, monkeypatch, bert):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": text, "labels": ["odd"] if i % 5 == 0 else []} for i, (text, _) in enumerate(reviews(90))]
    open_bank("bank", bert).train("t", rows, rows, kind="multilabel", labels="odd", **FAST)
    task = Bank.open("bank").get("t").manifest.task
    (line,) = (line for line in shell("show", "--bank", "bank", "--task", "t").out.splitlines() if "confid" in line)
    fitted = f"temperature {task['temperature']:.2f}; " if "temperature" in task else ""
    assert line == f"confidence   {fitted}thresholds odd {task['thresholds'][0]:g}"
