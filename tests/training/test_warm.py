"""`training.warm`: every form is trained and asked once for each length that kernels tell apart."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from adapterbank.api import warm as api
from adapterbank.encoder import forward, kernels
from adapterbank.encoder.backbone import load
from adapterbank.encoder.batch import Tokens
from adapterbank.encoder.kernels import launch
from adapterbank.encoder.kernels.launch import Compilation, CompilerError, kernel_cache
from adapterbank.encoder.placed import place
from adapterbank.errors import ConfigError, TrainingError
from adapterbank.inference import graph_runner, graphs
from adapterbank.inference.engine import Engine
from adapterbank.inference.rows import Rows
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.tasks.spec import Task
from adapterbank.training import graph_step, trainer
from adapterbank.training.graph_rule import ALWAYS
from adapterbank.training.job import TrainingJob
from adapterbank.training.loop import Together, train
from adapterbank.training.warm import warm
from families import save_random
from jobs import GPU
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
    assert sorted(steps) == sorted([32, 48, 48] * 3)  # the longest also with outputs computed again
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
    assert sorted(steps) == sorted([32, 40, 40] * 3)


class Recorded:
    """Takes the place of a compilation, and of the launches: what a kernel is specialised on."""

    def __init__(self, device=None):
        self.done = True

    keys: ClassVar[set] = set()

    def add(self, kernel, grid, arguments, constants):
        forms = [
            launch._form(argument) if isinstance(argument, torch.Tensor) or not parameter.do_not_specialize else ""
            for parameter, argument in zip(kernel.params, arguments, strict=False)
        ]
        self.keys.add((kernel.fn.__name__, tuple(forms), tuple(sorted(constants.items()))))

    def wait(self):
        """Nothing is waited for."""

    def close(self):
        """Nothing is stopped."""


@pytest.fixture
def recorded(monkeypatch):
    """Let a CPU launch the kernels of a GPU, which are recorded and write nothing; return what was launched."""
    pytest.importorskip("triton")
    find, fuse = kernels.find_kernels, forward.fused_attention
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "Compilation", Recorded)
    monkeypatch.setattr(trainer.np, "isfinite", lambda x: np.ones_like(x, bool))
    for module in (graph_step, graph_runner):
        monkeypatch.setattr(module, "find_kernels", lambda device: find(GPU))
        monkeypatch.setattr(module, "fused_attention", lambda config, device: fuse(config, GPU))
    monkeypatch.setattr(Recorded, "keys", set())
    token = launch._CURRENT.set(Recorded())
    yield Recorded.keys
    launch._CURRENT.reset(token)


def rows_of(length, count):
    return [Tokens(np.zeros(length, np.int64), np.zeros(length, np.int64))] * count


def test_every_kernel_of_later_trainings_and_answers_is_compiled(tmp_path, new_slot, recorded):
    save_random("bert", tmp_path, hidden_size=64, num_attention_heads=4, max_position_embeddings=256)
    backbone = load(str(tmp_path))
    placed, wanted = place(backbone, CPU, torch.bfloat16), plans(backbone, Options(size=64), Options(size=16))
    warm(backbone, placed, wanted, 200)
    compiled = set(recorded)
    assert len(compiled) > 20
    for plan, count, lengths in ((wanted[0], 32, (9, 40, 64, 100, 200)), (wanted[1], 5, (40, 130))):
        for length in lengths:
            rows = rows_of(length, count)
            data = Rows(rows, [k % 5 for k in range(count)])
            job = TrainingJob(
                plan, new_slot(backbone, plan), data, Rows(rows[:1], None), lambda _: 0.0, 0.0, 1, batch=32
            )
            train(placed, [job], together=Together(rule=ALWAYS))
    assert recorded - compiled == set()
    engine = Engine(backbone, placed=placed)
    for number, (plan, labels) in enumerate(itertools.product(wanted, (2, 20))):
        own = replace(plan, head=Head("classification", labels))
        names = tuple(f"label {k}" for k in range(labels))
        task = Task("t", "classification", ("text",), "label", names, "accuracy")
        tensors = {name: t.numpy() for name, t in new_slot(backbone, own).items()}
        engine.put(str(number), task, own, tensors, 256)
    engine.use_graphs()
    for length, names in itertools.product((3, 33, 200), (["0"], ["1", "3"], ["2"], ["0", "2", "3"])):
        engine.outputs(rows_of(length, 8), [names[k % len(names)] for k in range(8)])
    assert recorded - compiled == set()


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
