"""Tests of `adapterbank.api.progress`: training is seen in a terminal and in a notebook, and is quiet elsewhere."""

from __future__ import annotations

import builtins
import os
import pty
import subprocess
import sys
import types

import pytest

from adapterbank.api.opened import open_bank
from small_data import FAST, reviews

CODE = """
import sys
from adapterbank import open_bank
sys.path[:0] = {paths!r}
from small_data import FAST, reviews
progress = {{"None": None, "True": True, "False": False}}[sys.argv[3]]
open_bank(sys.argv[1], sys.argv[2], device="cpu").train("s", reviews(), **FAST, progress=progress)
"""


def train_in_terminal(folder, encoder, progress):
    """Run a script whose standard error is a terminal; return what it wrote there."""
    mine, theirs = pty.openpty()
    words = [sys.executable, "-c", CODE.format(paths=sys.path), folder / "bank", encoder, str(progress)]
    with subprocess.Popen(words, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as started:
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(mine, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            found += part
    os.close(mine)
    assert started.returncode == 0, found.decode()
    return found.decode()


def test_train_shows_progress_and_notes_in_a_terminal(tmp_path, checkpoint):
    found = train_in_terminal(tmp_path, checkpoint("bert")[0], None)
    assert "epoch 2/2: loss" in found
    assert "note: No dev data given" in found


def test_train_is_quiet_in_a_terminal_if_told(tmp_path, checkpoint):
    assert train_in_terminal(tmp_path, checkpoint("bert")[0], False) == ""


def test_train_is_quiet_without_a_terminal_unless_told(tmp_path, bert, capfd):
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    bank.train("s", reviews(), **FAST)
    assert capfd.readouterr() == ("", "")
    bank.train("s", reviews(), **FAST, progress=True)
    out, errors = capfd.readouterr()
    assert out == ""
    assert "note: No dev data given" in errors
    assert "epoch 2/2: loss" in errors


def test_callbacks_replace_what_is_shown(tmp_path, bert, capfd):
    bank, notes = open_bank(tmp_path / "bank", bert, device="cpu"), []
    bank.train("s", reviews(), **FAST, progress=True, note=notes.append, watch=None)
    errors = capfd.readouterr().err
    assert notes[0].startswith("No dev data given")
    assert "note:" not in errors
    assert "epoch 2/2" in errors


@pytest.fixture
def notebook(monkeypatch):
    """Return what a notebook would display; rich asks IPython's `get_ipython` where it is."""
    displayed = []
    display = types.ModuleType("IPython.display")
    display.display = lambda value: displayed.append(value)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    return displayed


def test_train_shows_progress_and_notes_in_a_notebook(tmp_path, bert, notebook):
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    bank.train("s", reviews(), **FAST)
    texts = [value._repr_mimebundle_([], [])["text/plain"] for value in notebook]
    assert any("note: No dev data given" in text for text in texts)
    assert [text.split(":")[0] for text in texts if text.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    notebook.clear()
    bank.train("s", reviews(), **FAST, progress=False)
    assert notebook == []
