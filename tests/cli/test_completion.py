"""Promise: the shell completes commands, options and their values, and `-v` says what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from small_data import FAST, flags, reviews, shell, write

ENTRY = "import sys; sys.argv[0] = 'adapterbank'; from adapterbank.cli.entry import main; main()"


def run(*words, **environment):
    return subprocess.run(
        [sys.executable, "-c", ENTRY, *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("line", "offered"),
    [("adapterbank tr", ["train"]), ("adapterbank train --method l", ["layernorm", "lora"])],
)
def test_bash_completes_commands_and_values(line, offered):
    count = str(len(line.split()) - 1)
    found = run(_ADAPTERBANK_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=count)
    assert found.stdout.split() == offered, found.stderr


def test_options_are_completed():
    found = run(_ADAPTERBANK_COMPLETE="complete_bash", COMP_WORDS="adapterbank train --epo", COMP_CWORD="2")
    assert found.stdout.split() == ["--epochs"]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(name):
    found = run(_ADAPTERBANK_COMPLETE=f"source_{name}")
    assert found.returncode == 0, found.stderr
    assert "_ADAPTERBANK_COMPLETE" in found.stdout


# --- verbose ------------------------------------------------------------------------------------------------


def test_verbose_says_what_is_loaded_and_done_and_when(tmp_path, checkpoint):
    encoder, data = checkpoint("bert")[0], write(tmp_path / "rows.csv", reviews())
    words = ["train", "--bank", str(tmp_path / "bank"), "--task", "s", "--train", str(data), *map(str, flags(FAST))]
    found = run("-v", *words, "--backbone", str(encoder), "--device", "cpu")
    assert found.returncode == 0, found.stderr
    assert re.search(rf"^ +\d+ ms  train: 24 rows of {data}$", found.stderr, re.MULTILINE)
    assert re.search(rf"^ +\d+ ms  the encoder {encoder} is in {encoder}$", found.stderr, re.MULTILINE)
    assert re.search(r"^ +\d+ ms  loaded it: [\d,]+ parameters", found.stderr, re.MULTILINE)
    assert re.search(r"^ +\d+ ms  epoch 1 of \d+: \d+\.\d s, dev score 0\.\d+$", found.stderr, re.MULTILINE)
    assert re.search(r"^ +\d+ ms  wrote the package$", found.stderr, re.MULTILINE)
    asked = run("-v", "predict", "--bank", str(tmp_path / "bank"), "--task", "s", "--text", "the cat")
    assert re.search(rf"ms  loaded s@1 from {tmp_path / 'bank' / 'tasks' / 's' / '1'}: ", asked.stderr)
    assert asked.stdout.count("\n") == 1


def test_verbose_shows_the_traceback_of_an_error_and_the_same_sentence(tmp_path):
    plain, verbose = (run(*flag, "tasks", "--bank", str(tmp_path / "none")) for flag in ([], ["-v"]))
    assert plain.stderr.count("\n") == 1
    assert "Traceback" not in plain.stderr
    assert "Traceback (most recent call last)" in verbose.stderr
    assert plain.stderr in verbose.stderr
    assert (plain.returncode, verbose.returncode) == (2, 2)


def test_both_are_in_the_help():
    text = shell("--help").out
    assert "--install-completion" in text
    assert "--verbose" in text
