"""Promise: the README's commands and Python run as shown, its numbers are measured, and the file tree is complete."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from adapterbank.config import Config
from adapterbank.methods import METHODS, Options
from adapterbank.slots import tensors as slot_tensors
from adapterbank.slots.plan import Head, make_plan, trained
from small_data import shell, write

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.removeprefix("$ ") for line in README.splitlines() if line.startswith("$ adapterbank ")]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FILMS = ("film", "story", "cast", "ending", "music", "plot")
WHICH = ("first", "second", "third", "last")


def reviews(count):
    words = (("dull", "negative"), ("warm and funny", "positive"))
    return [(f"The {WHICH[i // 6 % 4]} {FILMS[i % 6]} was {words[i % 2][0]}.", words[i % 2][1]) for i in range(count)]


@pytest.fixture(scope="module")
def session(tmp_path_factory, minilm):
    """Return a folder with the two files of the README's session."""
    folder = tmp_path_factory.mktemp("session")
    write(folder / "reviews.csv", reviews(24))
    write(folder / "test.csv", reviews(8))
    return folder


def test_there_is_a_session_to_run():
    assert {command.split()[1] for command in COMMANDS} >= {"train", "predict", "evaluate", "tasks", "audit"}
    assert len(PYTHON) == 1


@pytest.mark.minilm
def test_every_command_runs_in_order(session, monkeypatch):
    monkeypatch.chdir(session)
    for command in COMMANDS:
        words = shlex.split(re.sub(r"--epochs \d+", "--epochs 1", command))[1:]
        found = shell(*words)
        assert found.code == 0, (command, found)
        assert found.out, command


def masked(text):
    """Return a text's lines without numbers, dates and column widths, which depend on the data and the day."""
    lines = (re.sub(r"[\d.,:-]+", "0", line) for line in text.splitlines())
    return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("note")]


@pytest.mark.minilm
def test_the_output_of_the_commands_has_the_format_shown(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in session.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    block = re.search(r"```console\n(.*?)```", README, re.DOTALL)[1]
    for part in block.split("$ adapterbank ")[1:]:
        command, _, shown = part.partition("\n")
        words = shlex.split(re.sub(r"--epochs \d+", "--epochs 1", command))
        assert masked(shell(*words).out) == masked(shown), command
    assert "605,954 trained parameters (2.67 %" in block


@pytest.mark.minilm
def test_the_python_session_runs_and_returns_the_values_shown(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in session.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    names, checked = {}, 0
    code = PYTHON[0].replace("epochs=5", "epochs=1")
    for line in code.splitlines():
        statement, _, comment = line.partition("  # ")
        value = eval_or_exec(statement, names)
        shown = re.match(r"\[.*?\]|\(.*?\)|True|False", comment.strip())
        if shown:
            assert value == ast.literal_eval(shown[0]), line
            checked += 1
    assert checked >= 3
    assert 0 <= names["result"].record["metrics"]["dev"]["accuracy"] <= 1


def eval_or_exec(statement, names):
    try:
        return eval(compile(statement, "README", "eval"), names)
    except SyntaxError:
        exec(compile(statement, "README", "exec"), names)
        return None


@pytest.mark.minilm
@pytest.mark.parametrize(
    ("method", "options", "share"),
    [
        ("adapter", {"size": 64}, "2.7 % at size 64"),
        ("adapter", {"size": 8}, "0.4 % at 8"),
        ("top", {}, "7.8 % a layer"),
        ("layernorm", {}, "0.05 %"),
        ("lora", {}, "0.3 %"),
        ("ia3", {}, "0.06 %"),
        ("bitfit", {}, "0.1 %"),
        ("feature", {}, "0.003 %"),
    ],
)
def test_the_shares_of_the_method_table_are_true(minilm, method, options, share):
    plan = make_plan(Options(method=method, **options), depth=6, head=Head("classification", 2))
    tensors = dict(minilm.tensors) | slot_tensors.initial(plan, minilm.config, 0.01, 0)
    percent = 100 * sum(tensors[name].numel() for name in trained(tensors, plan)) / minilm.parameters
    row = next(line for line in README.splitlines() if line.startswith(f"| `{method}` |"))
    assert share in row
    digits = len(share.split(" %")[0].partition(".")[2])
    assert f"{percent:.{digits}f}" == share.split(" %")[0]


def test_the_headline_numbers_are_those_of_the_committed_measurement():
    results = ROOT / "bench" / "results"
    lone, base, clock = (
        json.loads((results / f"{name}.json").read_text(encoding="utf-8")) for name in ("gpu_lone", "gpu_base", "clock")
    )
    everyone = lone["inference"]["base"]["contestants"]
    own, copy = (everyone[name]["median_ms"] for name in ("adapterbank: mixed", "lone, reduce-overhead [bf16]"))
    assert f"takes {own:.2f} ms; one fine-tuned copy" in README
    assert f"answers one task only, takes {copy:.2f} ms" in README
    peer = base["inference"]["base"]["peers"]["adapters: mixed"]["median_ms"]
    assert f"with BatchSplit took {peer:.0f} ms in an earlier run" in README
    whole = clock["processes"]["adapterbank train all, warm cache"]["median_seconds"]
    first = clock["processes"]["adapterbank train all, empty cache"]["median_seconds"]
    assert f"three epochs takes {whole:.1f} s, from the command to the package ({first:.1f} s when" in README
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"| ours, 32 rows of 32 tasks | {own:.2f}: " in performance
    assert f"| `adapters` BatchSplit, 32 adapters | {peer:.0f} |" in performance


def test_the_python_session_imports_only_the_package_itself():
    imported = re.findall(r"^\s*(?:import|from) (\S+)", PYTHON[0], re.MULTILINE)
    assert imported == ["adapterbank"]


def test_the_method_table_has_every_method():
    rows = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(rows) == sorted(METHODS)


def test_every_option_named_is_an_option():
    known = {f.name.replace("_", "-") for f in fields(Config)} | {
        "bank",
        "resume",
        "json",
        "data",
        "no-deps",
        "method",
        "help",
        "output",
        "dry-run",
        "abstain",
        "confidence",
        "keep",
        "engine",
        "out",
        "records",
        "tolerance",
        "install-completion",
        "tasks",
        "name",
    }
    for name in re.findall(r"--([a-z][a-z-]+)", README):
        assert name.removeprefix("no-") in known or name in known, name


def tree():
    """Return the file tree in docs/design.md as words by path."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = re.search(r"```\nsrc/adapterbank/\n(.*?)```", design, re.DOTALL)
    assert block
    found, folders = {}, []
    for line in block[1].splitlines():
        name, _, words = line.strip().partition(" ")
        folders = folders[: (len(line) - len(line.lstrip())) // 2 - 1]
        found["".join([*folders, name])] = words.split()
        folders += [name] if name.endswith("/") else []
    return found


def test_the_tree_names_every_file_and_no_other():
    package = ROOT / "src" / "adapterbank"
    files = [path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"]
    folders = {f"{folder}/" for path in files for folder in path.parents if str(folder) != "."}
    listed = {str(path) for path in files if path.parent.name != "commands"}
    assert set(tree()) == listed | folders


def test_the_tree_describes_each_file_in_at_most_six_words():
    assert {name: words for name, words in tree().items() if not 1 <= len(words) <= 6} == {}


def test_the_walks_name_modules_and_functions_that_exist():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    walks = design[design.index("## Three walks") : design.index("## Rooms")]
    steps = re.findall(r"`([a-z_]+(?:/[a-z_]+)*)\.py` `([A-Za-z_.]+)`", walks)
    assert len(steps) > 30
    for module, name in steps:
        found = importlib.import_module(f"adapterbank.{module.replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)
    for module in re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", design):
        roots = (ROOT / "src" / "adapterbank", ROOT)
        assert any((root / module).exists() for root in roots), module
