"""Claims about the commands that look after a bank: tasks, show, evaluate, remove, rollback, gc, backbones, help."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from adapterbank.api import open_bank
from adapterbank.cli.main import app
from adapterbank.encoder.sources import SOURCES
from adapterbank.storage.bank import Bank
from small_data import FAST, answers, flags, pairs, reviews, scores, shell, snapshot, tags, write

ROWS = reviews()
COMMANDS = (
    *("train", "predict", "evaluate", "tasks", "show", "remove", "rollback", "audit", "gc", "backbones", "serve"),
    *("sweep", "ablate", "prune", "figures", "report"),
    *("catalog", "data", "squad", "glue-score", "glue-submission", "cache"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint):
    """Make one bank of every kind of task, one with three versions; tests work on copies."""
    folder = tmp_path_factory.mktemp("commands")
    bank = open_bank(folder / "bank", str(checkpoint("bert")[0]), device="cpu")
    for seed in range(3):
        bank.train("sentiment", ROWS, ROWS, **{**FAST, "epochs": 4}, seed=seed)
    bank.train("score", scores(), scores(), **FAST)
    bank.train("tags", tags(), tags(), **FAST)
    bank.train("pair", pairs(), pairs(), **FAST)
    bank.train("span", answers(), answers(), **FAST)
    return folder / "bank"


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "bank")
    write(tmp_path / "test.csv", ROWS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words, **options):
    found = shell(words[0], "--bank", "bank", *words[1:], **options)
    assert (found.code, found.err) == (0, ""), found
    return found


# --- help and JSON ------------------------------------------------------------------------------------------


def test_these_are_the_commands():
    assert [command.name for command in app.registered_commands] == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_explains_itself_with_an_example(name, flag):
    found = shell(name, flag)
    assert (found.code, found.err) == (0, "")
    assert f"Example: adapterbank {name}" in " ".join(found.out.split()) or f"| adapterbank {name}" in found.out
    assert "--json" in found.out
    assert "(default: " in found.out or name in (
        "tasks",
        "show",
        "remove",
        "gc",
        "backbones",
        "glue-score",
        "cache",
        "figures",
        "report",
    )


def test_the_commands_are_listed_without_being_asked_and_with():
    for words in ([], ["--help"], ["-h"]):
        found = shell(*words)
        assert (found.code, found.err) == (0, "")
        assert all(f" {name} " in found.out for name in COMMANDS)


def test_the_version_is_told():
    import adapterbank

    assert shell("--version").out == f"adapterbank {adapterbank.__version__}\n"


JSON = {
    "train": ["--task", "new", "--train", "test.csv", *flags(FAST)],
    "predict": ["--task", "sentiment", "--text", "good"],
    "evaluate": ["--task", "sentiment", "--data", "test.csv"],
    "tasks": [],
    "show": ["--task", "sentiment"],
    "remove": ["--task", "sentiment@1", "--yes"],
    "rollback": ["--task", "sentiment"],
    "audit": [],
    "gc": ["--dry-run"],
}


@pytest.mark.parametrize("name", JSON)
def test_json_prints_one_json_value_and_nothing_else(here, name):
    found = shell(name, "--bank", "bank", *JSON[name], "--json")
    assert found.code == 0
    assert isinstance(found.json, dict | list)
    assert all(line.startswith("note: ") for line in found.err.splitlines())


def test_json_is_there_for_every_command():
    elsewhere = {"catalog", "data", "squad", "glue-score", "glue-submission", "cache"}  # test_cli_catalog.py
    studies = {"sweep", "ablate", "prune", "figures", "report"}  # test_cli_sweep.py, test_cli_analysis.py
    assert {*JSON, "backbones", "serve", *elsewhere, *studies} == set(COMMANDS)  # test_cli_serve.py


# --- tasks and show -----------------------------------------------------------------------------------------


def test_tasks_lists_each_default_version_with_its_score_and_cost(here):
    lines = run("tasks").out.splitlines()
    assert lines[0].split() == ["task", "version", "kind", "dev", "metric", "method", "trained", "size", "made"]
    assert [line.split()[:3] for line in lines[1:6]] == [
        ["pair", "1", "classification"],
        ["score", "1", "regression"],
        ["sentiment", "3", "classification"],
        ["span", "1", "span"],
        ["tags", "1", "multilabel"],
    ]
    assert lines[-1].endswith("× the encoder's parameters, instead of 5×")
    assert "5 tasks on " in lines[-1]


def test_tasks_as_json_are_the_manifests_without_the_probes(here):
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
    assert found.code == 0
    assert [line.split()[0] for line in found.out.splitlines()[1:5]] == ["pair", "sentiment", "span", "tags"]
    assert len(found.err.splitlines()) == 1
    assert "score/1/manifest.json is not JSON" in found.err


def test_a_thousand_tasks_are_listed_by_name(tmp_path, made, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a power cut is not what this is about
    bank = Bank.open(tmp_path / "bank", Bank.open(made).backbone, create=True)
    draft = Bank.open(made).get("sentiment").manifest
    names = [f"task-{number:04}" for number in range(1000)]
    for name in names:
        bank.put(replace(draft, name=name, task={**draft.task, "name": name}), {"head.bias": np.zeros(2, np.float32)})
    lines = shell("tasks", "--bank", bank.path).out.splitlines()
    assert [line.split()[0] for line in lines[1:1001]] == names
    assert "1000 tasks on " in lines[-1]
    assert len(shell("tasks", "--bank", bank.path, "--json").json) == 1000


@pytest.mark.parametrize("task", ["sentiment", "sentiment@1", "score", "tags", "pair", "span"])
def test_show_tells_all_that_is_known_of_a_task(here, task):
    found = run("show", "--task", task).out
    manifest = Bank.open("bank").get(task).manifest
    said = {line[:12].strip(): line[13:] for line in found.splitlines()}
    assert said["task"].startswith(f"{manifest.name}@{manifest.version}, {manifest.task['kind']}, reads ")
    assert said["labels"] == (", ".join(manifest.task["labels"]) or "-")
    assert f"{manifest.task['metric']} " in said["dev scores"]
    assert said["trained"].startswith(f"{manifest.params['trained']:,} parameters")
    assert f"lr 0.01, epochs {manifest.recipe['epochs']}" in said["recipe"]
    assert said["recipe"].endswith(f"seed {manifest.seed}")
    assert said["versions"] == ("1, 2, 3 (default)" if manifest.name == "sentiment" else "1 (default)")


def test_show_as_json_is_the_manifest(here):
    assert run("show", "--task", "score", "--json").json == json.loads(
        (here / "bank" / "tasks" / "score" / "1" / "manifest.json").read_text()
    )


# --- evaluate -----------------------------------------------------------------------------------------------


def test_evaluate_prints_the_metrics_and_the_confusion_matrix(here):
    found = run("evaluate", "--task", "sentiment", "--data", "test.csv")
    scored = run("evaluate", "--task", "sentiment", "--data", "test.csv", "--json").json
    lines = found.out.splitlines()
    assert lines[0] == "sentiment@3 on 24 rows"
    assert lines[1].split() == ["accuracy", f"{scored['accuracy']:.4f}", "(the", "task's", "own", "metric)"]
    assert f"  macro_f1         {scored['macro_f1']:.4f}" in lines
    assert ["label", "precision", "recall", "f1", "rows"] in [line.split() for line in lines]
    at = lines.index("confusion matrix (rows: true label, columns: predicted label)")
    assert lines[at + 1].split() == ["negative", "positive"]
    for line, label, counts in zip(lines[at + 2 :], ("negative", "positive"), scored["confusion"], strict=True):
        assert line.split() == [label, *map(str, counts)]
    assert sum(map(sum, scored["confusion"])) == scored["rows"] == 24


@pytest.mark.parametrize(
    ("task", "rows", "columns", "names"),
    [
        ("score", scores(), ("text", "label"), {"pearson", "spearman"}),
        ("pair", pairs(), ("text", "text_pair", "label"), {"accuracy", "macro_f1", "confusion"}),
        ("tags", [list(row.values()) for row in tags()], ("text", "labels"), {"micro_f1", "subset_accuracy"}),
        ("span", [list(row.values()) for row in answers()], ("question", "context", "answer"), {"span_f1"}),
    ],
)
def test_evaluate_scores_every_kind_by_its_own_metrics(here, task, rows, columns, names):
    file = write(here / "data.jsonl", rows, columns)
    found = run("evaluate", "--task", task, "--data", file, "--json").json
    assert names <= set(found)
    assert found[found["metric"]] == Bank.open("bank").get(task).manifest.metrics["dev"][found["metric"]]
    assert f"{found['metric']} " in run("evaluate", "--task", task, "--data", file).out


# --- remove, rollback, gc -----------------------------------------------------------------------------------


def test_remove_needs_yes_where_nobody_can_be_asked(here):
    before = snapshot(here / "bank")
    found = shell("remove", "--bank", "bank", "--task", "sentiment@1", input="y\n")
    assert (found.code, found.out) == (2, "")
    assert found.err == "adapterbank: This would remove sentiment, version 1. Add --yes to do it.\n"
    assert snapshot(here / "bank") == before


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, [1, 2]), ("n\n", 1, [1, 2, 3]), ("", 130, [1, 2, 3])])
def test_remove_asks_on_a_terminal(here, answer, code, left):
    found = shell("remove", "--bank", "bank", "--task", "sentiment@3", input=answer, terminal=True)
    assert found.code == code
    assert "Remove sentiment, version 3? [y/N]: " in found.out
    assert Bank.open("bank").versions("sentiment") == left


def test_remove_takes_one_version_or_the_whole_task(here):
    assert run("remove", "--task", "sentiment@3", "--yes").out == "Removed sentiment, version 3.\n"
    assert Bank.open("bank").get("sentiment").ref == "sentiment@2"
    assert run("remove", "--task", "sentiment", "-y", "--json").json == {"removed": ["sentiment@1", "sentiment@2"]}
    assert "sentiment" not in Bank.open("bank").names()


def test_rollback_goes_to_the_version_before_or_to_the_one_named(here):
    assert run("rollback", "--task", "sentiment").out == "sentiment@2 is the default now.\n"
    assert run("rollback", "--task", "sentiment", "--to", "3", "--json").json == {"task": "sentiment", "default": 3}
    assert Bank.open("bank").get("sentiment").ref == "sentiment@3"


def test_gc_says_what_would_go_and_then_removes_it(here):
    before = snapshot(here / "bank")
    found = run("gc", "--dry-run")
    assert found.out.startswith("would remove bank/tasks/sentiment/1 (")
    assert found.out.splitlines()[-1].startswith("1 thing, ")
    assert snapshot(here / "bank") == before
    assert [item["reason"] for item in run("gc", "--json").json] == ["no pointer leads to it"]
    assert Bank.open("bank").versions("sentiment") == [2, 3]
    assert run("gc").out == "0 things, 0 B\n"
    assert shell("audit", "--bank", "bank").code == 0


def test_gc_clears_what_a_broken_write_left(here):
    left = here / "bank" / "tasks" / ".tmp-1234"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"x" * 10)
    for path in (left / "weights.safetensors", left):
        os.utime(path, (time.time() - 9999,) * 2)
    run("remove", "--task", "sentiment@1", "--yes")
    assert run("gc").out.splitlines() == [
        f"removed {left.relative_to(here)} (10 B): left by an interrupted write",
        "1 thing, 10 B",
    ]
    assert not left.exists()


# --- backbones ----------------------------------------------------------------------------------------------


def test_backbones_lists_the_short_names_and_says_which_are_at_hand():
    found = shell("backbones")
    assert (found.code, found.err) == (0, "")
    rows = {line.split()[0]: line for line in found.out.splitlines()[1:] if line}
    assert set(SOURCES) <= set(rows)
    listed = {item["name"]: item for item in shell("backbones", "--json").json}
    assert set(listed) == set(SOURCES)
    for name, item in listed.items():
        assert item["hub"] in rows[name]
        assert ("yes" if item["folder"] else "on the hub") in rows[name]


@pytest.mark.minilm
def test_the_embedded_encoder_is_at_hand(minilm):
    listed = {item["name"]: item["folder"] for item in shell("backbones", "--json").json}
    assert listed["minilm"] == str(minilm.folder)


def test_help_tasks_and_backbones_start_without_torch(here):
    code = """
import sys
from adapterbank.cli.main import main
for words in sys.argv[1].split(";"):
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
    assert not {"torch", "transformers", "sklearn", "scipy"} & set(sys.modules), words
"""
    light = ["--help", "train --help", "predict --help", "backbones", "gc --bank bank --dry-run"]
    light += ["tasks --bank bank", "show --bank bank --task score", "rollback --bank bank --task sentiment"]
    light += ["remove --bank bank --task score --yes"]
    found = subprocess.run(
        [sys.executable, "-c", code, ";".join(light)], capture_output=True, text=True, timeout=900, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_states_of_unfinished_runs_are_named_and_go_when_asked(here):
    state = here / "bank" / "runs" / "0123456789abcdef"
    state.mkdir(parents=True)
    (state / "state.json").write_text("{}")
    assert "the states of 1 unfinished run are kept; --runs removes them too" in shell("gc", "--bank", "bank").err
    assert "would remove" in run("gc", "--runs", "--dry-run").out
    assert state.exists()
    assert "state of an unfinished run" in run("gc", "--runs").out
    assert not state.exists()


def test_a_rollback_can_be_undone_after_gc(here):
    versions = json.loads(run("show", "--task", "sentiment", "--json").out)["version"]
    run("rollback", "--task", "sentiment", "--to", "1")
    run("gc")
    assert run("rollback", "--task", "sentiment", "--to", versions).out == f"sentiment@{versions} is the default now.\n"
