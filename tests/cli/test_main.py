"""The command line as a whole: the list of commands, their help, `--json`, the version, start-up without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import adapterbank
from adapterbank.cli.main import app
from adapterbank.install import extra_command
from small_data import FAST, flags, reviews, shell, write

COMMANDS = (
    *("train", "predict", "evaluate", "tasks", "show", "remove", "rollback", "audit", "gc", "serve"),
    *("sweep", "teach-together", "ablate", "prune", "soup", "figures", "report"),
    *("backbones", "catalog", "data", "cache", "warm", "squad", "glue-score", "glue-submission"),
)


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


def test_the_commands_are_listed_with_help_and_without_arguments():
    for words in ([], ["--help"], ["-h"]):
        found = shell(*words)
        assert (found.code, found.err) == (0, "")
        assert all(f" {name} " in found.out for name in COMMANDS)


def test_help_keeps_brackets_and_breaks_lines_only_at_the_width():
    text = shell("figures", "--help", COLUMNS="200").out
    assert extra_command("plot") in text
    lines = [line.strip() for line in text.splitlines()]
    assert any(line.startswith("Writes SVG") and line.endswith(extra_command("plot")) for line in lines)


def test_the_version_is_printed():
    assert shell("--version").out == f"adapterbank {adapterbank.__version__}\n"


@pytest.mark.parametrize("name", JSON)
def test_json_prints_one_json_value_and_nothing_else(here, name):
    found = shell(name, "--bank", "bank", *JSON[name], "--json")
    assert found.code == 0
    assert isinstance(found.json, dict | list)
    assert all(line.startswith("note: ") for line in found.err.splitlines())


def test_every_command_has_json_output():
    elsewhere = {
        "backbones",
        "serve",
        "sweep",
        "teach-together",
        "ablate",
        "prune",
        "soup",
        "catalog",
        "data",
        "cache",
        "warm",
    }  # in commands/
    benchmarks = {"squad", "glue-score", "glue-submission"}  # in commands/
    reports = {"figures", "report"}  # in tests/analysis
    assert {*JSON, *elsewhere, *benchmarks, *reports} == set(COMMANDS)


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


def test_a_run_on_a_cpu_imports_only_what_it_computes_with(here):
    code = """
import sys
from adapterbank.cli.main import main
for words in sys.argv[1].split(";"):
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
    unused = {"sklearn", "scipy", "pandas", "matplotlib", "pyarrow", "sympy", "torch._dynamo", "torch._inductor"}
    assert not unused & set(sys.modules), (words, unused & set(sys.modules))
"""
    write(here / "many.csv", reviews(120))  # enough to fit a temperature and thresholds
    options = " ".join(map(str, flags({**FAST, "few": "never", "metric": "f1", "device": "cpu"})))
    runs = [f"train --bank bank --task new --train many.csv --dev many.csv {options}"]
    runs += ["evaluate --bank bank --task new --data many.csv --device cpu"]
    runs += ["predict --bank bank --task new --text good --device cpu"]
    runs += ["predict --bank bank --task new --device cpu --out out.csv many.csv"]
    found = subprocess.run(
        [sys.executable, "-c", code, ";".join(runs)], capture_output=True, text=True, timeout=900, check=False
    )
    assert found.returncode == 0, found.stderr
