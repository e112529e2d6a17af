"""Tests of `adapterbank.runtime`: how many threads are used, and that the user's settings are kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from adapterbank import runtime

TOKENISE = """
import os
from tokenizers import Tokenizer, models
from adapterbank import runtime
runtime.cores = lambda: 64
runtime.use_few_threads_for_texts()
before = len(os.listdir("/proc/self/task"))
Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode_batch(["a b"] * 64)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize(("cores", "set_before", "expected"), [(64, None, "6"), (64, "3", "3"), (4, None, None)])
def test_the_tokenizer_gets_few_threads_unless_the_user_or_the_machine_differs(
    cores, set_before, expected, monkeypatch
):
    monkeypatch.setattr(runtime, "cores", lambda: cores)
    monkeypatch.setenv("RAYON_NUM_THREADS", set_before or "")
    if set_before is None:
        monkeypatch.delenv("RAYON_NUM_THREADS")
    runtime.use_few_threads_for_texts()
    assert os.environ.get("RAYON_NUM_THREADS") == expected


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted as Linux lists them")
def test_the_tokenizer_uses_as_many_threads_as_it_is_given():
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("RAYON", "TOKENIZERS"))}
    done = subprocess.run([sys.executable, "-c", TOKENISE], capture_output=True, text=True, env=settings, check=True)
    assert int(done.stdout) == 6


def test_a_server_keeps_few_primitives_unless_the_user_has_chosen(monkeypatch):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    runtime.keep_few_primitives()
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    runtime.keep_few_primitives()
    assert int(os.environ[name]) < 100
