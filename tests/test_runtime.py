"""Tests of `adapterbank.runtime`: how many threads are used, and that the user's settings are kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from adapterbank import runtime
from adapterbank.errors import ConfigError

TOKENISE = """
import os
from tokenizers import Tokenizer, models
from adapterbank import runtime
from adapterbank.errors import ConfigError
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


CPU = torch.device("cpu")


def test_a_cpu_computes_in_float32_whatever_layout_its_matrices_have():
    assert runtime.find_dtype("auto", CPU) == runtime.find_dtype("fp32", CPU) == torch.float32
    assert [runtime.find_layout(name, CPU) for name in ("auto", "fp32", "bf16", "int8")] == [
        "fp32",
        "fp32",
        "bf16",
        "int8",
    ]
    assert runtime.find_layout("bf16", torch.device("cuda")) == "fp32"


def test_int8_on_a_gpu_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="only a CPU computes; use bf16 on a GPU"):
        runtime.find_dtype("int8", torch.device("cuda"))


def test_a_cpu_whose_bf16_products_end_the_process_is_found_by_another_process(monkeypatch):
    """One machine reports bf16 instructions that end a process; the process that asks must survive."""
    monkeypatch.setattr(runtime, "_PROBE", "import os; os.kill(os.getpid(), 4)")
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setitem(runtime._PROBLEMS, "bf16", runtime._bf16_problem.__wrapped__)
    with pytest.raises(
        ConfigError, match=r"a trial of its bf16 products failed \(exit status -4: it said nothing\); use fp32"
    ):
        runtime.find_dtype("bf16", CPU)


def test_a_build_without_int8_products_says_so(monkeypatch):
    monkeypatch.setattr(runtime, "_supported_engines", lambda: [])
    monkeypatch.setitem(runtime._PROBLEMS, "int8", runtime._int8_problem.__wrapped__)
    with pytest.raises(ConfigError, match="no int8 products for this CPU; use fp32"):
        runtime.find_dtype("int8", CPU)
