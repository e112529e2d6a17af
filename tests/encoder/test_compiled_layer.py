"""Promise: one compiled form serves all layers, lengths and numbers of rows of an encoder with slots of one shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.batch import TokenStore
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.forward import compiled_layer_fns, forward, join_projections, run_layer
from adapterbank.inference import graphs
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.static_routing import StaticRoute
from families import TEXTS, save_random

pytestmark = pytest.mark.filterwarnings("ignore")  # compilers have advice of their own

CPU = torch.device("cpu")


class Compiler:
    """Compiles on the CPU, without making code, and counts the graphs and their variable sizes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        self.graphs: list[int] = []
        compile = torch.compile
        monkeypatch.setattr(graphs.torch, "compile", lambda f, **options: compile(f, backend=self.note, **options))
        self.programs = GraphCompiler(CPU)
        self.programs._compiles = True

    def note(self, module: Any, inputs: list[Any]) -> Any:
        self.graphs.append(sum(isinstance(one, torch.SymInt) for one in inputs))
        return module.forward

    def layer_only(self, function: Any, changing: Any) -> Any:
        return self.programs.compiled(function, changing) if function is run_layer else function


def pass_through(backbone: Backbone, new_slot: Any, fns: Any, *, slots: int, length: int) -> torch.Tensor:
    """Run rows of some slots as a training step does; each slot has two rows."""
    plan = make_plan(Options(size=4), depth=backbone.config.layers, head=Head("classification", 2))
    found = [new_slot(backbone, plan, seed=seed) for seed in range(slots)]
    block = torch.stack([torch.cat([tensor.flatten() for tensor in one.values()]) for one in found])
    own, start = {}, 0
    for name, tensor in found[0].items():  # views of one block, as in a stack: each begins elsewhere
        own[name] = block[:, start : start + tensor.numel()].unflatten(1, tensor.shape).detach().requires_grad_()
        start += tensor.numel()
    rows = backbone.tokenize(TEXTS[:4] * slots, max_length=length)[: 2 * slots]
    batch, _ = TokenStore.of(rows, CPU).batch(torch.arange(len(rows)), length)
    drop = Dropout(row_keys(1, 2, torch.arange(len(rows))), batch.rows, batch.positions, rate=0.1, attention_rate=0.1)
    route = StaticRoute(join_projections(backbone.tensors), own, plan)
    return forward(backbone.config, route, batch, drop, layer_fns=fns)


@pytest.fixture
def other(tmp_path: Path) -> Backbone:
    """Return an encoder with other sizes than the small BERT."""
    save_random("bert", tmp_path, num_attention_heads=2, hidden_size=48, intermediate_size=40)
    return load(str(tmp_path))


def test_a_layer_is_compiled_once_for_each_encoder_and_number_of_slots(
    bert: Backbone, other: Backbone, new_slot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    fns = compiled_layer_fns(compiler.layer_only)
    for backbone in (bert, other):
        for slots, lengths in ((3, (16, 8, 24)), (1, (24, 16))):
            before = len(compiler.graphs)
            for length in lengths:
                found = pass_through(backbone, new_slot, fns, slots=slots, length=length)
                expected = pass_through(backbone, new_slot, None, slots=slots, length=length)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            assert len(compiler.graphs) == before + 1
    assert max(compiler.graphs) <= 8  # rows, lengths and tokens, not the sizes of slots and where they begin
