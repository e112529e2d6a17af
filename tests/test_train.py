"""The training loop: gradients against `transformers`, runs beside runs, interrupted runs, runs that fail."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from adapterbank import train as training
from adapterbank.batches import Rows, epoch_order, make_rows
from adapterbank.encoder import prefix as prefixes
from adapterbank.encoder.anatomy import checkpoint_names
from adapterbank.errors import TrainingError
from adapterbank.methods import Head, Options, first_trained_layer, make_plan
from adapterbank.optimizer import Settings
from adapterbank.tasks.spec import Examples
from adapterbank.train import Lesson, State, train
from families import FAMILIES

CPU = torch.device("cpu")
SUBJECTS = ("the cat", "a dog", "the big red fox", "the lazy small dog in the house", "it", "a mat")
ENDS = ("", ".", " on the mat", " in a house!", " over it", " why")


def reviews(count, seed):
    """Give texts of any length that say `good` or `bad`, and which of the two."""
    random = np.random.default_rng(seed)
    targets = [int(t) for t in random.integers(0, 2, count)]
    texts = [f"{random.choice(SUBJECTS)} was {('bad', 'good')[t]}{random.choice(ENDS)}" for t in targets]
    return Examples(texts, None, targets)


def accuracy(targets):
    return lambda given: float(np.mean([int(out.argmax()) == t for out, t in zip(given, targets, strict=True)]))


def lesson_on(backbone, new_slot, options=None, *, head=None, rows=20, seed=0, rate=1e-3, epochs=2, **changes):
    """Give a small classification lesson; `changes` are fields of `Lesson`."""
    head = head or Head("classification", 2)
    anatomy = backbone.anatomy
    plan = make_plan(options or Options(size=4), depth=anatomy.layers, head=head, shared_layers=anatomy.shared_layers)
    data, dev = reviews(rows, seed), reviews(7, seed + 100)
    return Lesson(
        **{
            "plan": plan,
            "initial": new_slot(backbone, plan, seed=seed, sigma=0.05),
            "train": make_rows(backbone, data, kind="classification", max_length=32),
            "dev": make_rows(backbone, dev, kind="classification", max_length=32),
            "score": accuracy(dev.targets),
            "rate": rate,
            "epochs": epochs,
            "batch": 6,
            "seed": seed,
            **changes,
        }
    )


def learn(backbone, *lessons, **options):
    return train(backbone, lessons, device=CPU, dtype=torch.float32, **options)


def assert_same_bits(found, expected):
    assert found.tensors.keys() == expected.tensors.keys() == {"weights", "best", "first", "second"}
    for part, tensors in expected.tensors.items():
        assert found.tensors[part].keys() == tensors.keys()
        for name in tensors:
            assert torch.equal(found.tensors[part][name], tensors[name]), f"{part} {name}"
    assert scores(found) == scores(expected)
    assert (found.epoch, found.step, found.best_epoch) == (expected.epoch, expected.step, expected.best_epoch)


def assert_close(found, expected, tolerance=1e-5):
    for part in ("weights", "first", "second"):
        for name, tensor in expected.tensors[part].items():
            close = {"atol": tolerance, "rtol": tolerance}
            torch.testing.assert_close(found.tensors[part][name], tensor, msg=lambda m, n=name: f"{n}: {m}", **close)
    losses = [[epoch["loss"] for epoch in state.history] for state in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=tolerance)


def scores(state):
    return [(epoch["loss"], epoch["score"]) for epoch in state.history]


def moved(state, lesson):
    """Say how far the furthest number has moved from where it began."""
    return max(float((t - lesson.initial[name]).abs().max()) for name, t in state.tensors["weights"].items())


# --- one step's gradient, against transformers ---

METHODS = {
    "full": Options(method="full"),
    "top 2": Options(method="top", top=2),
    "layernorm": Options(method="layernorm"),
    "feature": Options(method="feature"),
}


def one_step(backbone, lesson):
    """Give the gradient of the first step: Adam's first moment is a tenth of it, when nothing is clipped."""
    lesson = dataclasses.replace(lesson, epochs=1, batch=len(lesson.train), settings=Settings(clip=0.0))
    (state,) = learn(backbone, lesson, dropout=0.0)
    return {name: moment / 0.1 for name, moment in state.tensors["first"].items()}, state


def their_gradient(model, backbone, lesson, loss):
    """Give the gradient of the same loss by `transformers` and torch's autograd, by our names."""
    model = copy.deepcopy(model)
    names = checkpoint_names(backbone.anatomy, backbone.has_pooler)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for ours, value in lesson.initial.items():
            if ours in names:
                theirs[names[ours]].copy_(value)
    head = torch.nn.Linear(backbone.anatomy.hidden, lesson.plan.head.outputs)
    head.load_state_dict({leaf: lesson.initial[f"head.{leaf}"] for leaf in ("weight", "bias")})
    pooled = []
    for row in lesson.train.tokens:
        out = model(input_ids=torch.from_numpy(row.ids)[None])
        pooled.append(
            out.pooler_output[0] if lesson.plan.head.pooling == "pooler" else out.last_hidden_state[0].mean(0)
        )
    value = loss(head(torch.stack(pooled)), torch.tensor(lesson.train.targets))
    value.backward()
    found = {"head.weight": head.weight.grad, "head.bias": head.bias.grad}
    return found | {ours: theirs[names[ours]].grad for ours in lesson.initial if ours in names}, value.item()


@pytest.mark.parametrize(
    ("family", "method"),  # layers that share their weights have no top
    [(family, method) for family in FAMILIES for method in METHODS if (family, method) != ("albert", "top 2")],
)
def test_a_steps_gradient_is_what_transformers_and_autograd_give(family, method, tiny, checkpoint, new_slot):
    backbone = tiny(family)
    pooling = "pooler" if backbone.has_pooler and method == "full" and family != "mpnet" else "mean"
    lesson = lesson_on(backbone, new_slot, METHODS[method], head=Head("classification", 2, pooling), rows=8)
    found, state = one_step(backbone, lesson)
    expected, loss = their_gradient(checkpoint(family)[1], backbone, lesson, torch.nn.CrossEntropyLoss())
    assert found.keys() == expected.keys() == lesson.initial.keys()
    assert state.history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            found[name], gradient, atol=1e-5 * max(1.0, scale), rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.2, 3.0), (5.0, 0.0)])
def test_class_weights_change_the_gradient_as_torchs_weighted_cross_entropy_says(weights, bert, checkpoint, new_slot):
    lesson = lesson_on(bert, new_slot, METHODS["layernorm"], rows=9, class_weights=weights)
    assert 0 < sum(lesson.train.targets) < 9
    found, state = one_step(bert, lesson)
    weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor(weights))
    expected, loss = their_gradient(checkpoint("bert")[1], bert, lesson, weighted)
    assert state.history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


# --- the same again ---


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_the_same_seed_gives_the_same_bits_twice(family, tiny, new_slot):
    backbone = tiny(family)
    assert backbone.anatomy.dropout == backbone.anatomy.attention_dropout == 0.1
    lesson = lesson_on(backbone, new_slot)
    (a,), (b,) = learn(backbone, lesson), learn(backbone, lesson)
    assert_same_bits(a, b)
    assert moved(a, lesson) > 1e-4


def test_another_seed_gives_other_numbers(bert, new_slot):
    lesson = lesson_on(bert, new_slot)
    (a,), (b,) = learn(bert, lesson), learn(bert, dataclasses.replace(lesson, seed=1))
    assert scores(a) != scores(b)


def test_the_state_of_torchs_own_generator_changes_nothing(bert, new_slot):
    lesson = lesson_on(bert, new_slot)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (a,) = learn(bert, lesson)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    (b,) = learn(bert, lesson)
    assert_same_bits(a, b)


def test_dropout_is_on_unless_it_is_switched_off(bert, new_slot):
    lesson = lesson_on(bert, new_slot)
    (own,), (named,), (off,) = (learn(bert, lesson, dropout=rate) for rate in (None, 0.1, 0.0))
    assert_same_bits(own, named)
    assert scores(own) != scores(off)


def test_every_step_draws_other_masks(bert, new_slot):
    """One row, and a rate at which its weights all but stand still: only dropout can change its loss."""
    lesson = lesson_on(bert, new_slot, rows=1, batch=1, rate=1e-12, epochs=4)
    (on,), (off,) = learn(bert, lesson), learn(bert, lesson, dropout=0.0)
    losses = [epoch["loss"] for epoch in on.history]
    assert all(abs(a - b) > 1e-4 for a, b in itertools.combinations(losses, 2))
    assert [epoch["loss"] for epoch in off.history] == pytest.approx([off.history[0]["loss"]] * 4, abs=1e-6)


# --- beside others ---


@pytest.mark.parametrize("family", ["bert", "mpnet", "albert"])
def test_a_run_beside_others_is_the_run_alone(family, tiny, new_slot):
    backbone = tiny(family)
    lessons = [
        lesson_on(backbone, new_slot, Options(size=4), seed=0, rate=1e-3, epochs=2),
        lesson_on(
            backbone, new_slot, Options(size=7, activation="relu"), seed=5, rate=3e-3, epochs=3, batch=4, rows=13
        ),
        lesson_on(backbone, new_slot, Options(method="layernorm"), seed=9, rate=1e-3, epochs=1, batch=9),
        lesson_on(backbone, new_slot, Options(size=3), seed=2, settings=Settings(bias_correction=True, clip=0.1)),
    ]
    together = learn(backbone, *lessons)
    for lesson, state in zip(lessons, together, strict=True):
        (alone,) = learn(backbone, lesson)
        assert state.step == alone.step == lesson.epochs * -(-len(lesson.train) // lesson.batch)
        assert moved(alone, lesson) > 1e-3
        assert_close(state, alone)


@pytest.mark.parametrize("order", list(itertools.permutations(["full", "adapter", "other full"])))
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_a_run_that_trains_the_whole_encoder_may_stand_anywhere_beside_others(family, order, tiny, new_slot):
    backbone = tiny(family)
    lessons = {
        "full": lesson_on(backbone, new_slot, Options(method="full"), seed=1, epochs=1, rate=1e-4),
        "other full": lesson_on(backbone, new_slot, Options(method="full"), seed=2, epochs=1, rate=1e-4),
        "adapter": lesson_on(backbone, new_slot, Options(size=4), seed=3, epochs=1),
    }
    together = learn(backbone, *(lessons[name] for name in order))
    for name, state in zip(order, together, strict=True):
        assert_close(state, learn(backbone, lessons[name])[0])


@pytest.mark.parametrize("method", ["full", "top"])
def test_rows_of_a_slot_that_changes_whole_layers_are_never_packed_with_anothers(method, bert, new_slot, monkeypatch):
    packed = []
    original = training._School._losses
    monkeypatch.setattr(
        training._School, "_losses", lambda self, chosen, part: packed.append(part) or original(self, chosen, part)
    )
    options = Options(method=method, top=3)
    lessons = [
        lesson_on(bert, new_slot, o, seed=k, epochs=1) for k, o in enumerate((options, Options(size=4), options))
    ]
    learn(bert, *lessons)
    assert len(packed) == 12
    assert all(len({k for k, _ in part}) == 1 for part in packed)


def test_runs_that_start_at_different_layers_are_taught_apart_and_come_out_as_alone(bert, new_slot):
    lessons = [
        lesson_on(bert, new_slot, Options(layers=layers), seed=k) for k, layers in enumerate(("all", "2", "all"))
    ]
    for state, lesson in zip(learn(bert, *lessons), lessons, strict=True):
        assert_close(state, learn(bert, lesson)[0])


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_run_that_ends_makes_room_for_the_next_and_none_notices(at_once, bert, new_slot):
    """Sizes of other classes, other labels, other numbers of epochs: entries are freed and taken again."""
    lessons = [
        lesson_on(bert, new_slot, Options(size=size), seed=k, epochs=epochs, rate=rate)
        for k, (size, epochs, rate) in enumerate(
            [(4, 1, 1e-2), (9, 3, 1e-3), (4, 2, 3e-3), (3, 1, 1e-3), (16, 2, 1e-2)]
        )
    ]
    together = learn(bert, *lessons, at_once=at_once)
    for state, lesson in zip(together, lessons, strict=True):
        assert state.epoch == lesson.epochs
        assert_close(state, learn(bert, lesson)[0])


@pytest.mark.parametrize("options", [Options(method="feature"), Options(method="top", top=1), Options(layers="2")])
def test_frozen_lower_layers_run_once_per_row_however_many_epochs_and_runs(options, bert, new_slot, monkeypatch):
    lessons = [lesson_on(bert, new_slot, options, seed=k, epochs=3) for k in range(2)]
    lessons[1] = dataclasses.replace(lessons[1], train=lessons[0].train, dev=lessons[0].dev)
    expected = [learn(bert, lesson)[0] for lesson in lessons]
    rows, original = [], prefixes.lower
    monkeypatch.setattr(
        prefixes, "lower", lambda a, s, batch, first: rows.append(len(batch.lengths)) or original(a, s, batch, first)
    )
    found = learn(bert, *lessons)
    assert sum(rows) <= 2 * len(lessons[0].train) + len(lessons[0].dev)  # a mixed batch may meet a row twice
    assert sum(rows) >= len(lessons[0].train)
    for state, alone in zip(found, expected, strict=True):
        assert_close(state, alone)


@pytest.mark.parametrize("budget", [{"memory": 0}, {"memory": 0, "disk": 0}])
def test_a_prefix_in_a_mapped_file_or_none_at_all_gives_the_same(budget, bert, new_slot, monkeypatch):
    lesson = lesson_on(bert, new_slot, Options(method="top", top=1), epochs=2)
    (expected,) = learn(bert, lesson)
    original = training.Prefixes
    monkeypatch.setattr(training, "Prefixes", lambda anatomy, frozen: original(anatomy, frozen, **budget))
    assert_close(learn(bert, lesson)[0], expected)


# --- memory ---


def long_and_short(backbone, new_slot):
    return [
        lesson_on(backbone, new_slot, Options(size=4), seed=0),
        lesson_on(backbone, new_slot, Options(size=9), seed=1, class_weights=(0.5, 2.0), batch=5),
    ]


@pytest.mark.parametrize("limit", [1, 20, 64])
def test_micro_batches_add_up_to_the_whole_batch(limit, bert, new_slot, monkeypatch):
    lessons = long_and_short(bert, new_slot)
    whole = learn(bert, *lessons)
    calls = []
    original = training.forward
    monkeypatch.setattr(training, "forward", lambda *a: calls.append(a[2]) or original(*a))
    monkeypatch.setattr(training, "_token_limit", lambda anatomy, device: limit)
    cut = learn(bert, *lessons)
    assert len(calls) > sum(state.step for state in cut)
    assert all(len(batch.lengths) * batch.longest <= limit or len(batch.lengths) == 1 for batch in calls)
    for mine, expected in zip(cut, whole, strict=True):
        assert_close(mine, expected)


class Scarce:
    """A forward pass that runs out of memory at some of its calls."""

    def __init__(self, monkeypatch, fails, error=None):
        self.calls, self.fails, self.sizes = 0, fails, []
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.original = training.forward
        monkeypatch.setattr(training, "forward", self)

    def __call__(self, anatomy, route, batch, *rest):
        self.calls += 1
        self.sizes.append(len(batch.lengths))
        if self.fails(self.calls, batch):
            raise self.error
        return self.original(anatomy, route, batch, *rest)


@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_step_that_ran_out_of_memory_is_taken_again_in_halves_with_the_same_result(call, bert, new_slot, monkeypatch):
    lessons = long_and_short(bert, new_slot)
    whole = learn(bert, *lessons)
    scarce = Scarce(monkeypatch, lambda number, batch: number == call)
    states = learn(bert, *lessons)
    assert scarce.sizes[call] < scarce.sizes[call - 1] == 11
    for mine, expected in zip(states, whole, strict=True):
        assert mine.step == expected.step
        assert_close(mine, expected)


def test_running_out_in_the_middle_of_a_step_leaves_nothing_of_it_behind(bert, new_slot, monkeypatch):
    lessons = long_and_short(bert, new_slot)
    whole = learn(bert, *lessons)
    monkeypatch.setattr(training, "_token_limit", lambda anatomy, device: 60)
    scarce = Scarce(monkeypatch, lambda number, batch: number == 2)
    states = learn(bert, *lessons)
    assert scarce.sizes[0] < 11  # the first part of the step went well, the second did not
    for mine, expected in zip(states, whole, strict=True):
        assert_close(mine, expected)


def test_memory_for_a_few_rows_only_is_found_by_halving_again(bert, new_slot, monkeypatch):
    lesson = lesson_on(bert, new_slot)
    (whole,) = learn(bert, lesson)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")
    scarce = Scarce(monkeypatch, lambda number, batch: len(batch.lengths) * batch.longest > 24, error)
    (state,) = learn(bert, lesson)
    assert scarce.calls > state.step
    assert_close(state, whole)


def test_memory_for_not_even_one_row_ends_the_run_with_a_way_out(bert, new_slot, monkeypatch):
    Scarce(monkeypatch, lambda number, batch: True)
    with pytest.raises(TrainingError, match=r"Not even one row.*--max-length"):
        learn(bert, lesson_on(bert, new_slot))


def test_any_other_error_of_torch_is_not_taken_for_a_lack_of_memory(bert, new_slot, monkeypatch):
    scarce = Scarce(monkeypatch, lambda number, batch: True, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        learn(bert, lesson_on(bert, new_slot))
    assert scarce.calls == 1


# --- interrupted and resumed ---


def through_numpy(state):
    """Give a state as it comes back from a file."""
    kept = copy.deepcopy(state)
    for part, tensors in kept.tensors.items():
        kept.tensors[part] = {name: torch.from_numpy(t.numpy().copy()) for name, t in tensors.items()}
    return kept


def kept_after(backbone, lesson, **options):
    """Run to the end and give each epoch's kept state."""
    kept = []
    (end,) = learn(backbone, lesson, keep=lambda run, state: kept.append(through_numpy(state)), **options)
    return end, kept


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("method", ["adapter", "full", "feature"])
def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(method, bias_correction, bert, new_slot):
    settings = Settings(bias_correction=bias_correction)
    lesson = lesson_on(bert, new_slot, Options(method=method), epochs=4, settings=settings, rows=15)
    end, kept = kept_after(bert, lesson)
    assert [state.epoch for state in kept] == [1, 2, 3, 4]
    for state in kept:
        (resumed,) = learn(bert, lesson, resume={0: state})
        assert_same_bits(resumed, end)


def test_a_run_resumed_beside_another_ends_where_it_would_have(bert, new_slot):
    lessons = [
        lesson_on(bert, new_slot, seed=0, epochs=3),
        lesson_on(bert, new_slot, Options(size=9), seed=1, epochs=3),
    ]
    ends = [kept_after(bert, lesson) for lesson in lessons]
    resumed = learn(bert, *lessons, resume={1: ends[1][1][1]})
    for state, (end, _) in zip(resumed, ends, strict=True):
        assert (state.epoch, state.step) == (end.epoch, end.step)
        assert_close(state, end)


def test_a_state_that_is_kept_is_not_changed_by_the_epochs_after_it(bert, new_slot):
    """Whoever keeps states in memory has one for each epoch, not the last one three times."""
    kept = []
    learn(bert, lesson_on(bert, new_slot, epochs=3), keep=lambda run, state: kept.append(state))
    assert [state.epoch for state in kept] == [1, 2, 3]


def test_resuming_leaves_the_given_state_as_it_was(bert, new_slot):
    lesson = lesson_on(bert, new_slot, epochs=3)
    _, kept = kept_after(bert, lesson)
    given = kept[0]
    learn(bert, lesson, resume={0: given})
    assert (given.epoch, given.step, len(given.history)) == (1, 4, 1)


def test_a_finished_run_that_is_resumed_takes_no_step(bert, new_slot, monkeypatch):
    lesson = lesson_on(bert, new_slot)
    end, kept = kept_after(bert, lesson)
    Scarce(monkeypatch, lambda number, batch: True)
    (again,) = learn(bert, lesson, resume={0: kept[-1]})
    assert_same_bits(again, end)


# --- failing ---


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_names_the_learning_rate(bad, bert, new_slot):
    lesson = lesson_on(bert, new_slot, rate=0.25)
    lesson.initial["head.weight"].fill_(bad)
    with pytest.raises(TrainingError, match=r"step 1, epoch 1.*learning rate 0\.25.*--lr 0\.025"):
        learn(bert, lesson)


def test_a_learning_rate_without_measure_ends_in_that_error(bert, new_slot):
    with pytest.raises(TrainingError, match="learning rate 1e\\+30"):
        learn(bert, lesson_on(bert, new_slot, rate=1e30, epochs=3))


def test_dev_outputs_that_are_no_numbers_end_the_run_too(bert, new_slot):
    """The last step of an epoch may be the one that breaks, after its loss was seen to be fine."""
    with pytest.raises(TrainingError, match=r"dev rows.*learning rate"):
        learn(bert, lesson_on(bert, new_slot, rate=1e38, epochs=1, batch=20))


# --- which weights are given back ---


def scored(*wanted):
    """Give a score that says these numbers, an epoch each, whatever it is shown."""
    numbers = iter(wanted)
    return lambda given: next(numbers)


@pytest.mark.parametrize(
    ("wanted", "best"),
    [
        ((0.1, 0.5, 0.5, 0.3), 2),
        ((0.9, 0.5, 0.1, 0.0), 1),
        ((0.0, 0.0, 0.0, 0.0), 1),
        ((-3.0, -2.0, -2.5, -1.0), 4),
    ],
)
def test_the_best_epochs_weights_are_kept_and_the_first_of_equals(wanted, best, bert, new_slot):
    end, kept = kept_after(bert, lesson_on(bert, new_slot, epochs=4, score=scored(*wanted)))
    assert end.best_epoch == best
    assert end.best_score == wanted[best - 1]
    assert [epoch["score"] for epoch in end.history] == list(wanted)
    for name, tensor in kept[best - 1].tensors["weights"].items():
        assert torch.equal(end.tensors["best"][name], tensor)
    others = [state for state in kept if state.epoch != best]
    for state in others:
        assert not torch.equal(end.tensors["best"]["head.weight"], state.tensors["weights"]["head.weight"])


@pytest.mark.parametrize(
    ("patience", "wanted", "epochs"),
    [
        (0, (0.5, 0.4, 0.3, 0.2, 0.1), 5),
        (1, (0.5, 0.6, 0.6, 0.9, 0.9), 3),
        (2, (0.5, 0.4, 0.6, 0.5, 0.4), 5),
        (2, (0.5, 0.4, 0.3, 0.9, 0.9), 3),
        (9, (0.5, 0.4, 0.3, 0.2, 0.1), 5),
    ],
)
def test_patience_stops_a_run_after_so_many_epochs_without_a_better_score(patience, wanted, epochs, bert, new_slot):
    lesson = lesson_on(bert, new_slot, Options(method="feature"), epochs=5, patience=patience, score=scored(*wanted))
    (state,) = learn(bert, lesson)
    assert state.epoch == len(state.history) == epochs
    assert state.best_score == max(wanted[:epochs])


def test_a_score_that_is_no_number_still_leaves_weights_to_give_back(bert, new_slot):
    (state,) = learn(bert, lesson_on(bert, new_slot, score=scored(float("nan"), float("nan"))))
    assert state.best_epoch in (1, 2)
    assert state.tensors["best"].keys() == state.tensors["weights"].keys()


# --- what is touched, and what is learned ---

EVERY_METHOD = {
    "adapter": Options(size=4),
    "adapter without norms": Options(size=4, train_norms=False),
    "adapter above": Options(size=4, layers="1-2"),
    "full": Options(method="full"),
    "top": Options(method="top", top=2),
    "layernorm": Options(method="layernorm"),
    "feature": Options(method="feature"),
}


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_training_changes_no_bit_of_the_backbone_and_every_tensor_of_the_slot(method, bert, new_slot):
    before = {name: tensor.clone() for name, tensor in bert.tensors.items()}
    head = Head("classification", 2, "pooler" if method in ("full", "top") else "mean")
    lesson = lesson_on(bert, new_slot, EVERY_METHOD[method], head=head)
    given = {name: tensor.clone() for name, tensor in lesson.initial.items()}
    (state,) = learn(bert, lesson)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bert.tensors.items())
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in bert.tensors.values())
    assert all(torch.equal(tensor, given[name]) for name, tensor in lesson.initial.items())
    still = {name for name, tensor in state.tensors["weights"].items() if torch.equal(tensor, given[name])}
    assert state.tensors["weights"].keys() == given.keys()
    assert still == set()


@pytest.mark.parametrize("layers", ["all", "1-2", "2"])
def test_starting_in_the_middle_gives_the_gradients_of_starting_at_the_bottom(layers, bert, new_slot, monkeypatch):
    """Below the lowest trained layer nothing is kept for the backward pass, which must change nothing above."""
    lesson = lesson_on(bert, new_slot, Options(size=4, layers=layers))
    (found,) = learn(bert, lesson, dropout=0.0)
    original, starts = training.forward, set()

    def from_the_bottom(anatomy, route, batch, dropout, first, prefix):
        starts.add(first)
        return original(anatomy, route, batch, dropout, 0)

    monkeypatch.setattr(training, "forward", from_the_bottom)
    (expected,) = learn(bert, lesson, dropout=0.0)
    assert starts == {first_trained_layer(lesson.initial, 3)}
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("kind", "outputs", "targets"),
    [
        ("multilabel", 3, [(), (0,), (1, 2), (0, 1, 2), (2,), (1,), (0, 2)]),
        ("regression", 1, [1.0, 5.0, 2.5, 3.0, 4.0, 0.0, 2.0]),
        ("span", 2, [(1, 1), (1, 2), (2, 3), (1, 3), (2, 2), (3, 3), (1, 2)]),
    ],
)
def test_every_kind_of_task_is_learned_by_heart(kind, outputs, targets, bert, new_slot):
    tokens = bert.tokenize(
        ["the cat sat", "a dog ran on", "why was it", "red fox jumps", "who is bad", "in the house", "big small lazy"]
    )
    shift, scale = (2.5, 1.6) if kind == "regression" else (0.0, 1.0)
    rows = Rows(tokens, targets)
    lesson = lesson_on(
        bert,
        new_slot,
        Options(size=16),
        head=Head(kind, outputs, "mean", shift=shift, scale=scale),
        train=rows,
        dev=rows,
        score=lambda given: 0.0,
        rate=1e-2,
        epochs=40,
        batch=7,
    )
    (state,) = learn(bert, lesson, dropout=0.0)
    assert state.history[-1]["loss"] < 0.1 < state.history[0]["loss"]


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "albert"])
def test_adapters_on_a_small_random_encoder_learn_to_tell_good_from_bad(family, tiny, new_slot):
    backbone = tiny(family)
    data, dev = reviews(96, 1), reviews(60, 2)
    lesson = lesson_on(
        backbone,
        new_slot,
        Options(size=8),
        train=make_rows(backbone, data, kind="classification", max_length=32),
        dev=make_rows(backbone, dev, kind="classification", max_length=32),
        score=accuracy(dev.targets),
        rate=1e-2,
        epochs=8,
        batch=16,
    )
    (state,) = learn(backbone, lesson)
    assert state.best_score > 0.9
    assert state.history[-1]["loss"] < state.history[0]["loss"]


# --- what a watcher hears ---


def test_a_watcher_hears_of_every_step_and_of_every_epoch_with_its_score(bert, new_slot):
    heard = []
    lessons = [lesson_on(bert, new_slot, seed=0, rows=13), lesson_on(bert, new_slot, seed=1, rows=6, epochs=3)]
    states = learn(bert, *lessons, watch=heard.append)
    for run, (lesson, state) in enumerate(zip(lessons, states, strict=True)):
        mine = [progress for progress in heard if progress.run == run]
        steps = [progress for progress in mine if progress.score is None]
        ends = [progress for progress in mine if progress.score is not None]
        assert [progress.step for progress in steps] == list(range(1, state.step + 1))
        assert [progress.epoch for progress in ends] == list(range(1, lesson.epochs + 1))
        assert [progress.score for progress in ends] == [epoch["score"] for epoch in state.history]
        assert {progress.steps for progress in mine} == {state.step}
        per_epoch = state.step // lesson.epochs
        assert [progress.epoch for progress in steps] == [1 + k // per_epoch for k in range(state.step)]
        assert all(progress.rows_per_second > 0 and np.isfinite(progress.loss) for progress in mine)


def test_the_rows_of_a_step_are_those_of_the_epochs_order(bert, new_slot, monkeypatch):
    lesson = lesson_on(bert, new_slot, seed=4, rows=13, batch=5)
    seen = []
    original = training._School._gradients
    monkeypatch.setattr(
        training._School,
        "_gradients",
        lambda self, chosen: seen.append(chosen[0][1].tolist()) or original(self, chosen),
    )
    learn(bert, lesson)
    lengths = [len(row) for row in lesson.train.tokens]
    expected = [part.tolist() for epoch in (0, 1) for part in epoch_order(lengths, 5, seed=4, epoch=epoch)]
    assert seen == expected


def test_a_new_state_has_no_best_epoch():
    assert State().best_score == float("-inf")
