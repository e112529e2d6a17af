"""Tests of `adapterbank.api.options`: the keywords of `train` are those of a run, in the signature and for mypy."""

from __future__ import annotations

import inspect
import rlcompleter
import subprocess
import sys
import types
import typing
from dataclasses import fields

import pytest

import adapterbank
from adapterbank.api.options import CALLBACKS, RunOptions, TrainOptions
from adapterbank.config import Config

OWN = {"task", "train", "dev", "test"}
"""Fields that `train` takes as arguments of their own."""
WIDER = {"labels", "layers", "sites", "targets", "fuse"}
"""Options that take more than a field stores: lists in place of commas."""


def parts(hint):
    return set(typing.get_args(hint) or [hint])


def test_the_typed_options_are_the_fields_of_a_run():
    assert set(RunOptions.__annotations__) == {f.name for f in fields(Config)} - OWN
    assert set(TrainOptions.__annotations__) - set(RunOptions.__annotations__) == {*CALLBACKS}


def test_their_types_are_those_of_the_fields():
    wanted, found = typing.get_type_hints(Config), typing.get_type_hints(RunOptions)
    for name, hint in found.items():
        if name in WIDER:
            assert parts(wanted[name]) < parts(hint), name
        else:
            assert hint == wanted[name], name


def test_the_signature_of_train_lists_every_option_with_its_default():
    found = inspect.signature(adapterbank.OpenBank.train).parameters
    assert {f.name for f in fields(Config)} <= set(found)
    assert inspect.Parameter.VAR_KEYWORD not in {one.kind for one in found.values()}
    assert all(found[f.name].default == f.default for f in fields(Config) if f.name not in OWN)
    assert "resume" in found
    assert isinstance(found["lr"].annotation, str | types.UnionType)


def test_a_completer_that_reads_signatures_offers_the_keywords(tmp_path):
    """Notebooks complete keywords from the signature of the bound method, as the standard library's does names."""
    bank = adapterbank.open_bank(tmp_path / "bank", "minilm")
    assert "bank.train(" in rlcompleter.Completer({"bank": bank}).attr_matches("bank.tra")
    assert [name for name in inspect.signature(bank.train).parameters if name.startswith("ep")] == ["epochs", "epsilon"]


def test_help_explains_each_option():
    text = inspect.getdoc(adapterbank.OpenBank.train)
    for field in fields(Config):
        if field.name not in OWN:
            assert f"\n    {field.name}: {field.metadata['help'][:30]}" in text, field.name


@pytest.mark.slow
def test_a_type_checker_knows_the_keywords(tmp_path):
    code = tmp_path / "user.py"
    code.write_text(
        "import adapterbank\n"
        'bank = adapterbank.open_bank("bank", "minilm")\n'
        'bank.train("s", "rows.csv", epochs=5, size="auto", layers=[0, 1])\n'
        'bank.train("s", "rows.csv", epochs="five")\n'
        'bank.train("s", "rows.csv", epoch=5)\n'
    )
    words = ["--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent", "--ignore-missing-imports"]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *words, str(code)], capture_output=True, text=True, timeout=900, check=False
    )
    wrong = [line.partition("user.py:")[2] for line in found.stdout.splitlines() if ": error:" in line]
    assert [line.partition(":")[0] for line in wrong] == ["4", "5"], found.stdout
    assert '"epochs"' in wrong[0]
    assert '"epoch"' in wrong[1]
