"""`adapterbank tasks`: every task with its default version, score and size, whatever state the bank is in."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from adapterbank.storage.bank import Bank
from cli.invoke import run
from small_data import shell


def test_tasks_lists_each_default_version_with_its_score_and_cost(here):
    lines = run("tasks").out.splitlines()
    assert lines[0].split() == ["task", "version", "kind", "dev", "metric", "method", "trained", "size", "created"]
    assert [line.split()[:3] for line in lines[1:6]] == [
        ["pair", "1", "classification"],
        ["score", "1", "regression"],
        ["sentiment", "3", "classification"],
        ["span", "1", "span"],
        ["tags", "1", "multilabel"],
    ]
    assert lines[-1].endswith("× the encoder's parameters in total, instead of 5× with one fine-tuned copy per task")
    assert "5 tasks on " in lines[-1]


def test_tasks_as_json_are_the_manifests_without_the_fingerprints(here):
    found = run("tasks", "--json").json
    assert [task["name"] for task in found] == ["pair", "score", "sentiment", "span", "tags"]
    assert all("fingerprint" not in task and task["weights_sha256"] for task in found)


def test_an_empty_bank_says_how_to_fill_it(here):
    for name in Bank.open("bank").names():
        run("remove", "--task", name, "--yes")
    assert run("tasks").out == "The bank has no tasks yet. See: adapterbank train --help\n"
    assert run("tasks", "--json").json == []


def test_a_damaged_task_is_named_and_the_others_are_listed(here):
    (here / "bank" / "tasks" / "score" / "1" / "manifest.json").write_text("{")
    found = shell("tasks", "--bank", "bank")
    assert found.code == 1
    assert [line.split()[0] for line in found.out.splitlines()[1:5]] == ["pair", "sentiment", "span", "tags"]
    assert len(found.err.splitlines()) == 1
    assert "score/1/manifest.json is not JSON" in found.err


def test_a_hostile_manifest_is_shown_and_not_obeyed(tmp_path, bank_of_all_kinds):
    bank = Bank.open(tmp_path / "bank", Bank.open(bank_of_all_kinds).backbone, create=True)
    package = Bank.open(bank_of_all_kinds).get("sentiment")
    labels = ["\x1b]0;owned\x07\nfiles  none", "x" * 5000]
    bank.put(replace(package.manifest, task={**package.manifest.task, "labels": labels}), package.tensors())
    shown = shell("show", "--bank", bank.path, "--task", "sentiment").out
    line = next(line for line in shown.splitlines() if line.startswith("labels"))
    assert line == rf"labels       \x1b]0;owned\x07\nfiles  none, {'x' * 199}…"
    found = shell("show", "--bank", bank.path, "--task", "sentiment", "--json")
    assert found.json["task"]["labels"] == labels
    assert not {"\x1b", "\x07"} & {*shown, *found.out, *shell("tasks", "--bank", bank.path).out}


def test_a_thousand_tasks_are_listed_by_name(tmp_path, bank_of_all_kinds, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # saves time: this test is not about power cuts
    bank = Bank.open(tmp_path / "bank", Bank.open(bank_of_all_kinds).backbone, create=True)
    draft = Bank.open(bank_of_all_kinds).get("sentiment").manifest
    names = [f"task-{number:04}" for number in range(1000)]
    for name in names:
        bank.put(replace(draft, name=name, task={**draft.task, "name": name}), {"head.bias": np.zeros(2, np.float32)})
    lines = shell("tasks", "--bank", bank.path).out.splitlines()
    assert [line.split()[0] for line in lines[1:1001]] == names
    assert "1000 tasks on " in lines[-1]
    assert len(shell("tasks", "--bank", bank.path, "--json").json) == 1000
