"""`training.warm`: every form is trained and asked once for each length that kernels tell apart."""

from __future__ import annotations

import pytest
import torch

from adapterbank.api import warm as api
from adapterbank.encoder.kernels.launch import Compilation, CompilerError
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError, TrainingError
from adapterbank.inference import graph_runner, graphs
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.training import graph_step
from adapterbank.training.warm import kernel_cache, warm
from plain_kernels import PLAIN
from small_data import reviews

CPU = torch.device("cpu")


@pytest.fixture
def pretended(monkeypatch):
    """Let a CPU pass for a device with graphs; return the lengths of the training steps and the rows of batches."""
    steps, batches = [], []
    step, launch = graph_step.GraphStep.step, graph_runner.GraphRunner.launch

    def trained(self, inputs, table):
        steps.append(max(run.longest for run in inputs))
        return step(self, inputs, table)

    def launched(self, tokens, slots):
        batches.append(set(slots))
        return launch(self, tokens, slots)

    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    for module in (graph_step, graph_runner):
        monkeypatch.setattr(module, "find_kernels", lambda device: PLAIN)
    monkeypatch.setattr(graph_step.GraphStep, "step", trained)
    monkeypatch.setattr(graph_runner.GraphRunner, "launch", launched)
    return steps, batches


def plans(bert, *options):
    return [make_plan(one, depth=bert.config.layers, head=Head("classification", 5, "mean")) for one in options]


def test_each_form_takes_a_step_of_every_length_and_answers_rows_and_tokens(bert, pretended):
    steps, batches = pretended
    told = []
    wanted = plans(bert, Options(size=5), Options(size=8), Options(size=3), Options(method="layernorm"))
    done = warm(bert, place(bert, CPU, torch.float32), wanted, 48, lambda *counts: told.append(counts))
    assert done == 3  # 5 is padded to 8
    assert sorted(steps) == sorted([32, 48] * 3)
    assert set().union(*batches) == {None, *range(6)}
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_the_tasks_of_a_bank_are_compiled_for_beside_the_sizes_that_are_named(tmp_path, bert, checkpoint, pretended):
    from adapterbank import open_bank

    folder = str(checkpoint("bert")[0])
    bank = open_bank(tmp_path / "bank", folder, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "DEVICES", ())
        bank.train("a", reviews(), size=4, epochs=1, max_length=40)
        bank.train("b", reviews(), method="layernorm", epochs=1, max_length=16)
        bank.train("c", reviews(), method="full", epochs=1, max_length=16)
    steps, _ = pretended
    found = api.warm_up(folder, tmp_path / "bank", sizes=[16], max_length=8, device="cpu")
    assert found == (3, kernel_cache())
    assert sorted(steps) == sorted([32, 40] * 3)


def test_a_kernel_that_does_not_compile_is_an_error(bert, pretended, monkeypatch):
    def broken(compilation):
        raise CompilerError("OSError: ptxas is missing")

    monkeypatch.setattr(Compilation, "wait", broken)
    with pytest.raises(TrainingError, match="ptxas is missing"):
        warm(bert, place(bert, CPU, torch.float32), plans(bert, Options()), 32)


def test_a_cpu_is_refused_since_nothing_is_compiled_for_it(bert):
    with pytest.raises(ConfigError, match="nothing is compiled; use a GPU"):
        warm(bert, place(bert, CPU, torch.float32), plans(bert, Options()), 32)


@pytest.mark.parametrize("size", [0, -3, 10**9])
def test_an_impossible_size_is_refused_before_the_encoder_is_loaded(size):
    with pytest.raises(ConfigError, match=f"size is {size}"):
        api.warm_up("no such encoder", sizes=[size])


def test_the_folder_of_the_cache_is_the_compilers_own(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert kernel_cache() == tmp_path
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_cache() == tmp_path / ".triton" / "cache"
