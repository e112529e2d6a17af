"""`inference.shared_texts`: a text of several tasks is computed once where they agree, as each alone."""

from __future__ import annotations

import numpy as np
import pytest

from adapterbank.encoder import forward as pass_of
from adapterbank.inference import shared_texts
from adapterbank.inference.engine import Engine
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.tasks.spec import Examples, Task

TEXTS = ["the cat sat on the mat", "a big red fox jumps over the lazy dog", "why"]
TASKS = {
    "all": Options(size=4),
    "upper": Options(size=4, layers="1-2"),
    "top": Options(size=4, layers="2"),
    "norms": Options(method="layernorm", layers="upper") if "layers" in Options.__dataclass_fields__ else Options(),
    "head": Options(method="feature"),
}


@pytest.fixture
def engine(bert, new_slot):
    found = Engine(bert, device="cpu")
    for seed, (name, options) in enumerate(TASKS.items()):
        plan = make_plan(options, depth=bert.config.layers, head=Head("classification", 3, "mean"))
        task = Task(name, "classification", ("text",), "label", ("a", "b", "c"), "accuracy")
        tensors = {key: tensor.numpy() for key, tensor in new_slot(bert, plan, sigma=0.3, seed=seed).items()}
        found.put(name, task, plan, tensors, 64)
    return found


@pytest.fixture
def layers_run(monkeypatch):
    """Return the tokens that each layer computed, in order."""
    seen = []
    plain = pass_of.run_layer

    def counted(config, layer, grid, x, inputs, dropout):
        seen.append(len(x))
        return plain(config, layer, grid, x, inputs, dropout)

    monkeypatch.setattr(
        pass_of.LayerFns.__init__, "__defaults__", (counted, *pass_of.LayerFns.__init__.__defaults__[1:])
    )
    return seen


def answers(engine, names, texts=TEXTS):
    return [
        [one.probabilities or one.embedding for one in found]
        for found in engine.predict([(name, Examples(texts)) for name in names])
    ]


@pytest.mark.parametrize(
    "names",
    [["upper", "top", "head"], ["head", None], ["all", "upper"], list(TASKS), [*TASKS, None, "upper"]],
    ids=str,
)
def test_tasks_asked_of_one_text_answer_as_each_alone(engine, names):
    for name, found in zip(names, answers(engine, names), strict=True):
        for one, alone in zip(found, answers(engine, [name])[0], strict=True):
            if isinstance(one, dict):
                one, alone = list(one.values()), list(alone.values())
            np.testing.assert_allclose(one, alone, atol=1e-5)


def test_a_text_is_computed_once_below_the_lowest_layer_that_a_task_changes(engine, layers_run):
    layers = engine.backbone.config.layers
    answers(engine, ["head"])
    text, *_ = layers_run
    assert layers_run == [text] * layers
    layers_run.clear()
    answers(engine, ["upper", "head", None])
    assert layers_run == [text] + [2 * text] * (layers - 1)  # the bare encoder serves two of the three
    layers_run.clear()
    answers(engine, ["all", "all"])
    assert layers_run == [2 * text] * layers


def test_texts_that_differ_share_nothing(engine):
    rows = engine.prepare([("head", Examples(TEXTS))])[0].rows.tokens
    assert shared_texts.shared_below(engine.backbone.config, engine.stacks, rows, [0] * len(rows), None) is None
