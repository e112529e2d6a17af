"""`inference.engine`: requests of any tasks give the same results together as alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import torch

from adapterbank.errors import PackageDamaged, UnknownName
from adapterbank.inference import rows, runner
from adapterbank.inference.engine import Engine
from adapterbank.inference.predictions import Prediction, predict, predict_json
from adapterbank.inference.rows import Rows
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.tasks.spec import Examples, Task
from families import FAMILIES

TEXTS = ["the cat sat on the mat", "why", "a big red fox jumps over the lazy dog", "was it a good film?", "bad bad dog"]
PAIRS = ["the dog ran in the house", "a cat", "who is it", "the film was bad, the house was red", "why was the fox big"]
LABELS = ("north", "east", "south", "west")


def task(name, kind, *, pair=False):
    metric = {"classification": "accuracy", "multilabel": "micro_f1", "regression": "spearman", "span": "span_f1"}[kind]
    labels = LABELS if kind in ("classification", "multilabel") else ()
    return Task(name, kind, ("text", "other") if pair or kind == "span" else ("text",), "label", labels, metric)


def residents(backbone):
    """Return (task, plan, max_length) by name, for tasks that differ in kind, method, size, pooling and length."""
    config = backbone.config
    pooler = "pooler" if backbone.has_pooler else "first"
    wanted = {
        "place": ("classification", Options(size=3), Head("classification", 4, "mean"), 64),
        "pair": ("classification", Options(size=8, activation="relu"), Head("classification", 4, "first"), 64),
        "short": ("multilabel", Options(method="layernorm"), Head("multilabel", 4, "mean"), 5),
        "grade": ("regression", Options(method="feature"), Head("regression", 1, pooler, shift=3.0, scale=2.0), 64),
        "where": ("span", Options(size=5, train_norms=False), Head("span", 2), 64),
        "whole": ("classification", Options(method="full"), Head("classification", 4, pooler), 64),
    }
    return {
        name: (
            task(name, kind, pair=name == "pair"),
            make_plan(options, depth=config.layers, head=head, shared_layers=config.shared_layers),
            length,
        )
        for name, (kind, options, head, length) in wanted.items()
    }


@pytest.fixture
def engine_of(tiny, new_slot):
    def get(family, names=None):
        backbone = tiny(family)
        engine = Engine(backbone, device="cpu", precision="fp32")
        for seed, (name, (about, plan, length)) in enumerate(residents(backbone).items()):
            if names is None or name in names:
                tensors = new_slot(backbone, plan, seed=seed)
                engine.put(name, about, plan, {key: t.numpy() for key, t in tensors.items()}, length)
        return engine

    return get


def request(name, places):
    pairs = [PAIRS[i] for i in places] if name in ("pair", "where") else None
    return name, Examples([TEXTS[i] for i in places], pairs)


REQUESTS = [
    request("where", [3, 0]),
    request("place", [0, 1, 2, 3, 4]),
    request(None, [2, 1]),
    request("whole", [4, 0, 1]),
    request("pair", [1, 2]),
    request("place", [4]),
    request("short", [2, 0, 1]),
    request("grade", [0, 4, 2]),
    request(None, [4]),
    request("where", [1]),
]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for first, second in zip(found, expected, strict=True):
        a, b = first.to_json(), second.to_json()
        assert a.keys() == b.keys()
        for key in a:
            if key in ("label", "labels", "answer", "start", "end"):
                assert a[key] == b[key]
            elif key == "probabilities":
                assert a[key] == pytest.approx(b[key], abs=1e-5)
            else:
                np.testing.assert_allclose(a[key], b[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_of_many_tasks_give_the_same_results_together_as_alone(family, engine_of):
    engine = engine_of(family)
    requests = [r for r in REQUESTS for _ in range(2)]
    random.Random(0).shuffle(requests)
    together = engine.predict(requests)
    assert [len(predictions) for predictions in together] == [len(examples) for _, examples in requests]
    for (name, examples), found in zip(requests, together, strict=True):
        assert_same(found, engine.predict([(name, examples)])[0])
        alone = engine_of(family, names=(name,)) if name else engine_of(family, names=())
        for i in range(len(examples)):
            assert_same([found[i]], alone.predict([(name, examples.select([i]))])[0])


def test_predictions_have_the_order_of_the_rows(engine_of):
    engine = engine_of("bert")
    name, examples = request("place", [0, 1, 2, 3, 4])
    forward = engine.predict([(name, examples)])[0]
    backward = engine.predict([(name, examples.select([4, 3, 2, 1, 0]))])[0]
    assert_same(forward, backward[::-1])
    assert len({tuple(p.probabilities.values()) for p in forward}) == 5


def test_predictions_of_several_batches_have_the_order_of_the_rows(engine_of, monkeypatch):
    engine = engine_of("bert")
    whole = engine.predict(REQUESTS)
    monkeypatch.setattr(runner, "TOKENS_AT_ONCE", 12)
    for found, expected in zip(engine.predict(REQUESTS), whole, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_without_a_task_returns_the_mean_of_the_last_hidden_states(family, engine_of, checkpoint):
    engine, model = engine_of(family, names=("place",)), checkpoint(family)[1]
    found = engine.predict([(None, Examples(TEXTS))])[0]
    for text, prediction in zip(TEXTS, found, strict=True):
        ids = torch.from_numpy(engine.backbone.tokenize([text])[0].ids)[None]
        with torch.no_grad():
            expected = model(input_ids=ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(prediction.embedding, expected.numpy(), atol=1e-5, rtol=1e-5)
        assert set(prediction.to_json()) == {"embedding"}


def test_predictions_have_the_fields_of_their_kind(engine_of):
    engine = engine_of("bert")
    kinds = dict.fromkeys(["place", "short", "grade", "where"])
    for name in kinds:
        kinds[name] = engine.predict([request(name, [0, 3])])[0][1].to_json()
        json.dumps(kinds[name])
    assert set(kinds["place"]) == {"label", "probabilities"}
    assert set(kinds["short"]) == {"labels", "probabilities", "truncated"}
    assert set(kinds["grade"]) == {"value"}
    assert set(kinds["where"]) == {"answer", "start", "end"}
    assert PAIRS[3][kinds["where"]["start"] : kinds["where"]["end"]] == kinds["where"]["answer"]


@pytest.mark.parametrize("likely", [0.0, 4e-7, 0.12345649, 0.5, 0.999999499, 0.9999999, 1.0])
def test_probabilities_have_six_digits_in_json(likely):
    assert Prediction(probabilities={"a": likely}).to_json() == {"probabilities": {"a": round(likely, 6)}}


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
@pytest.mark.parametrize("output", [np.nan, np.inf, -np.inf])
def test_an_output_that_is_not_finite_is_refused(kind, output):
    outputs = np.zeros((3, 1 if kind == "regression" else len(LABELS)), np.float32)
    outputs[1, 0] = output
    many = HeadOutputs(task("a", kind), Examples([""] * 3), Rows([], None), list(outputs))
    for make in (predict, predict_json):
        with pytest.raises(PackageDamaged, match="'a' computes numbers that are not finite"):
            make(many)


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
def test_predict_json_equals_the_json_of_each_prediction_to_the_bit(kind):
    wide = 1 if kind == "regression" else len(LABELS)
    outputs = np.random.default_rng(4).normal(0, 9, (500, wide)).astype(np.float32)
    outputs[8], outputs[9] = 0, 300
    many = HeadOutputs(task("a", kind), Examples([""] * 500), Rows([], None), list(outputs))
    assert json.dumps(predict_json(many)) == json.dumps([one.to_json() for one in predict(many)])
    none = HeadOutputs(task("a", kind), Examples([]), Rows([], None), [])
    assert predict_json(none) == predict(none) == []


def test_finish_json_equals_the_json_of_finish_for_every_kind(engine_of):
    engine = engine_of("bert")
    for name in (*residents(engine.backbone), None):
        (prepared,) = engine.prepare([request(name, [0, 3, 4])])
        outputs = engine.compute(prepared.rows.tokens, [prepared.handle] * len(prepared.rows.tokens))
        predictions = engine.finish(prepared, outputs, 2)
        assert engine.finish_json(prepared, outputs, 2) == [prediction.to_json() for prediction in predictions]


def test_probabilities_are_the_softmax_or_sigmoid_of_the_outputs(engine_of):
    engine = engine_of("bert")
    for name, squash in (("place", scipy.special.softmax), ("short", scipy.special.expit)):
        _, examples = request(name, [0, 1, 2])
        outputs = engine.outputs(engine.rows(name, examples).tokens, [name] * 3)
        for out, prediction in zip(outputs, engine.predict([(name, examples)])[0], strict=True):
            expected = squash(out.astype(np.float64))
            assert list(prediction.probabilities) == list(LABELS)
            assert list(prediction.probabilities.values()) == pytest.approx(list(expected), abs=1e-12)
            if name == "place":
                assert prediction.label == LABELS[int(expected.argmax())]
            else:
                assert prediction.labels == tuple(x for x, p in zip(LABELS, expected, strict=True) if p > 0.5)


def make_constant(engine, name, bias):
    """Replace a task by one whose head gives the same outputs for every text."""
    resident = engine.residents[name]
    with engine.slots.using([engine.slots.find(name)]) as slots:
        (slot,) = slots.values()
        tensors = {key: tensor.numpy() for key, tensor in engine.stacks.take(slot).items()}
    tensors["head.weight"] = np.zeros_like(tensors["head.weight"])
    tensors["head.bias"] = np.array(bias, dtype=np.float32)
    engine.put(name, resident.task, resident.plan, tensors, resident.max_length)


def test_extreme_outputs_give_probabilities_of_zero_or_one_without_a_warning(engine_of):
    engine = engine_of("bert")
    bias = [2000.0, -2000.0, 2000.0, -2000.0]
    for name in ("place", "short"):
        make_constant(engine, name, bias)
    many = engine.predict([request("short", [0])])[0][0]
    assert many.labels == ("north", "south")
    assert list(many.probabilities.values()) == [1.0, 0.0, 1.0, 0.0]
    one = engine.predict([request("place", [0])])[0][0]
    assert list(one.probabilities.values()) == [0.5, 0.0, 0.5, 0.0]


def test_a_replaced_task_gives_new_results_and_the_others_the_same_as_before(engine_of, new_slot):
    engine = engine_of("bert")
    before = engine.predict(REQUESTS)
    count = len(engine.stacks)
    about, plan, length = residents(engine.backbone)["pair"]
    other = replace(plan, additions=(plan.additions[0].resized(17),))
    tensors = {key: t.numpy() for key, t in new_slot(engine.backbone, other, seed=50).items()}
    engine.put("pair", about, other, tensors, length)
    assert len(engine.stacks) == count
    after = engine.predict(REQUESTS)
    for (name, _), a, b in zip(REQUESTS, before, after, strict=True):
        if name == "pair":
            assert a[0].probabilities != pytest.approx(b[0].probabilities, abs=1e-3)
        else:
            assert_same(a, b)
    fresh = Engine(engine.backbone, device="cpu", precision="fp32")
    fresh.put("pair", about, other, tensors, length)
    pair = next(r for r in REQUESTS if r[0] == "pair")
    assert_same(after[REQUESTS.index(pair)], fresh.predict([pair])[0])


def test_the_max_length_of_a_task_cuts_only_its_own_texts(engine_of):
    engine = engine_of("bert")
    text = Examples([TEXTS[2]])
    assert [len(engine.rows(name, text).tokens[0]) for name in ("short", "place", None)] == [5, 11, 11]


def test_a_text_that_is_cut_is_named_in_the_answer_and_no_other_is(engine_of):
    engine = engine_of("bert")
    texts = Examples([TEXTS[2], "why", TEXTS[0]])
    long = Examples(["the cat sat on the mat " * 20, "why"])
    requests = [("short", texts), ("place", texts), ("short", Examples(["why"])), (None, long), ("place", long)]
    wanted = [[True, None, True], [None, None, None], [None], [True, None], [True, None]]
    together, alone = engine.predict(requests), [engine.predict([one])[0] for one in requests]
    for found in (together, alone):
        assert [[one.truncated for one in mine] for mine in found] == wanted
        assert [["truncated" in one.to_json() for one in mine] for mine in found] == [[*map(bool, w)] for w in wanted]
    assert engine.predict_json(requests) == [[one.to_json() for one in mine] for mine in together]
    document = engine.predict([("where", Examples(["who"], ["the cat sat on the mat " * 20]))])[0][0]
    assert document.truncated is None  # windows read all of it


def test_texts_that_several_tasks_share_are_tokenised_once(engine_of, monkeypatch):
    engine = engine_of("bert")
    texts, question = Examples(TEXTS), Examples(TEXTS, PAIRS)
    requests = [("place", texts), ("whole", texts), ("grade", texts), ("where", question), ("where", question)]
    expected = [engine.predict([one])[0] for one in requests]
    seen: list[str] = []
    for name in ("tokenize", "tokenize_windows"):
        real = getattr(rows, name)

        def counted(tokenizer, texts, *more, real=real, **options):
            seen.extend(texts)
            return real(tokenizer, texts, *more, **options)

        monkeypatch.setattr(rows, name, counted)
    for found, alone in zip(engine.predict(requests), expected, strict=True):
        assert_same(found, alone)
    assert sorted(seen) == sorted(TEXTS * 2)  # once as texts, once as questions


def test_the_error_for_an_unknown_task_lists_the_tasks(engine_of):
    engine = engine_of("bert")
    with pytest.raises(UnknownName, match="Did you mean 'place'") as caught:
        engine.predict([request("plaice", [0])])
    assert all(name in str(caught.value) for name in residents(engine.backbone))


def test_a_removed_task_is_unknown_and_the_others_stay(engine_of):
    engine = engine_of("bert")
    before = engine.predict([request("place", [0, 1])])[0]
    engine.remove("pair")
    with pytest.raises(UnknownName):
        engine.predict([request("pair", [0])])
    with pytest.raises(UnknownName):
        engine.remove("pair")
    assert_same(engine.predict([request("place", [0, 1])])[0], before)


def test_no_requests_and_requests_without_rows_give_no_predictions(engine_of):
    engine = engine_of("bert")
    assert engine.predict([]) == []
    empty = [(name, Examples([], [] if name in ("pair", "where") else None)) for name in (None, *engine.residents)]
    assert engine.predict(empty) == [[] for _ in empty]
    mixed = engine.predict([empty[0], request("place", [1]), empty[1]])
    assert [len(predictions) for predictions in mixed] == [0, 1, 0]
    assert engine.decide([("place", Examples([]))]) == [[]]


def test_an_empty_text_has_a_prediction(engine_of):
    engine = engine_of("bert")
    assert engine.predict([("place", Examples([""]))])[0][0].label in LABELS
    found = engine.predict([("where", Examples(["who"], [""]))])[0][0]
    assert (found.answer, found.start, found.end) == ("", 0, 0)


def test_decide_returns_what_the_metric_compares(engine_of):
    engine = engine_of("bert")
    for name, key in (("place", "label"), ("short", "labels"), ("grade", "value"), ("where", "answer")):
        _, examples = request(name, [0, 1, 3])
        (decided,) = engine.decide([(name, examples)])
        expected = [getattr(p, key) for p in engine.predict([(name, examples)])[0]]
        if key == "label":
            decided = [LABELS[i] for i in decided]
        elif key == "labels":
            decided = [tuple(LABELS[i] for i in chosen) for chosen in decided]
        assert decided == expected


def test_predicting_changes_no_tensor_of_the_backbone(engine_of):
    engine = engine_of("bert")
    before = {name: tensor.clone() for name, tensor in engine.backbone.tensors.items()}
    engine.predict(REQUESTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.backbone.tensors.items())
