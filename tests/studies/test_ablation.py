"""Claims about ablation: every span has exactly the outputs of the slot without those adapters, computed together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.encoder.placed import place
from adapterbank.errors import InputError
from adapterbank.inference.runner import outputs
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.stack import Stacks
from adapterbank.storage import records
from adapterbank.studies import ablation
from adapterbank.studies.ablation import span_outputs, spans, without
from small_data import FAST, answers, reviews

TEXTS = [text for text, _ in reviews(9)] + ["it", "the lazy small dog in the house was good on the mat"]


@pytest.fixture(params=["bert", "mpnet", "albert"])
def backbone(tiny, request):
    return tiny(request.param)


def ready(backbone, new_slot, layers="all", kind="classification"):
    """Return stacks with a task's slot and the same without adapters, the plan, the tensors and the rows."""
    norms = not backbone.config.shared_layers or layers == "all"
    options = Options(size=4, layers=layers, train_norms=norms)
    head = Head(kind, 2)
    plan = make_plan(options, depth=backbone.config.layers, head=head, shared_layers=backbone.config.shared_layers)
    tensors = new_slot(backbone, plan)
    stacks = Stacks(place(backbone, torch.device("cpu"), torch.float32).tensors)
    slots = stacks.put(plan, tensors), stacks.put(*without(plan, tensors, plan.removable_layers))
    return stacks, slots, plan, tensors, backbone.tokenize(TEXTS, None, 32)


def alone(backbone, plan, tensors, tokens):
    """Evaluate one slot alone."""
    stacks = Stacks(place(backbone, torch.device("cpu"), torch.float32).tensors)
    slot = stacks.put(plan, tensors)
    return outputs(backbone.config, stacks, tokens, [slot] * len(tokens))


def assert_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5)


def test_every_span_has_the_outputs_of_the_slot_without_those_adapters(backbone, new_slot):
    stacks, slots, plan, tensors, tokens = ready(backbone, new_slot)
    found = span_outputs(backbone.config, stacks, tokens, slots)
    assert set(found) == {None, (0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}
    for span, given in found.items():
        gone = range(span[0], span[1] + 1) if span else ()
        assert_near(given, alone(backbone, *without(plan, tensors, gone), tokens))


def test_spans_change_the_outputs(bert, new_slot):
    stacks, slots, *_, tokens = ready(bert, new_slot)
    found = span_outputs(bert.config, stacks, tokens, slots)
    first = {span: np.stack(given) for span, given in found.items()}
    assert all(np.abs(given - first[None]).max() > 1e-3 for span, given in first.items() if span)


def test_removing_no_adapter_changes_nothing_and_removing_all_gives_the_slot_without_adapters(bert, new_slot):
    stacks, slots, plan, tensors, tokens = ready(bert, new_slot)
    found = span_outputs(bert.config, stacks, tokens, slots)
    assert_near(found[None], alone(bert, plan, tensors, tokens))
    bare = {name: tensor for name, tensor in tensors.items() if ".adapter." not in name}
    assert_near(found[0, 2], alone(bert, without(plan, tensors, (0, 1, 2))[0], bare, tokens))


def test_a_selection_of_layers_has_the_spans_of_those_layers(bert, new_slot):
    stacks, slots, plan, tensors, tokens = ready(bert, new_slot, "0,2")
    found = span_outputs(bert.config, stacks, tokens, slots)
    assert set(found) == {None, (0, 0), (0, 2), (2, 2)}
    for span, given in found.items():
        gone = range(span[0], span[1] + 1) if span else ()
        assert_near(given, alone(bert, *without(plan, tensors, gone), tokens))


def test_rows_are_returned_in_their_order_whatever_the_batch_size(bert, new_slot, monkeypatch):
    stacks, slots, *_, tokens = ready(bert, new_slot)
    whole = span_outputs(bert.config, stacks, tokens, slots)
    monkeypatch.setattr(ablation, "_TOKENS_AT_ONCE", {"cpu": 1})
    seen = []
    one_by_one = span_outputs(bert.config, stacks, tokens, slots, lambda done, total: seen.append((done, total)))
    for span, given in whole.items():
        assert_near(one_by_one[span], given)
    assert seen == [(k + 1, len(tokens)) for k in range(len(tokens))]


def test_span_tasks_have_outputs_per_token(bert, new_slot):
    stacks, slots, plan, tensors, tokens = ready(bert, new_slot, kind="span")
    found = span_outputs(bert.config, stacks, tokens, slots)
    assert_near(found[1, 2], alone(bert, *without(plan, tensors, (1, 2)), tokens))


def test_twelve_layers_have_seventy_eight_spans():
    assert len(spans(range(12))) == 78
    assert spans([0, 3]) == [(0, 0), (0, 3), (3, 3)]


def test_only_the_adapters_of_the_given_layers_are_removed(bert, new_slot):
    *_, plan, tensors, _ = ready(bert, new_slot)
    smaller, rest = without(plan, tensors, (1,))
    assert smaller.removable_layers == (0, 2)
    assert smaller.trains == plan.trains
    gone = set(tensors) - set(rest)
    assert gone == {name for name in tensors if name.startswith("layers.1.") and ".adapter." in name}
    assert gone


def test_the_ablation_of_a_task_is_stored_beside_the_records(bert, tmp_path):
    bank = open_bank(tmp_path / "bank", bert)
    bank.train("s", reviews(), reviews(), **FAST)
    found = bank.ablate("s", reviews())
    assert len(found["spans"]) == 6
    assert found["whole"]["accuracy"] == bank.evaluate("s", reviews())["accuracy"]
    everything = next(s for s in found["spans"] if (s["first"], s["last"]) == (0, 2))
    whole, bare = found["whole"]["accuracy"], everything["scores"]["accuracy"]
    assert everything["change"]["accuracy"] == pytest.approx(100 * (bare - whole) / whole)
    (path,) = (tmp_path / "bank" / "records" / "ablations").glob("*.json")
    assert records.read_ablation(path) == found
    assert path.name.startswith("s@1-")


def test_span_tasks_are_ablated_on_their_own_metric(bert, tmp_path):
    bank = open_bank(tmp_path / "bank", bert)
    bank.train("q", answers(), answers(), **FAST)
    assert set(bank.ablate("q", answers())["spans"][0]["change"]) == {"span_f1", "exact_match"}


def test_a_method_without_adapters_is_reported(bert, tmp_path):
    bank = open_bank(tmp_path / "bank", bert)
    bank.train("s", reviews(), reviews(), **{**FAST, "size": 64, "method": "layernorm"})
    with pytest.raises(InputError, match="'layernorm' has no adapters"):
        bank.ablate("s", reviews())


def test_a_score_that_is_not_positive_has_no_relative_change():
    assert ablation.changes({"matthews": 0.1, "majority": 0.5}, {"matthews": 0.0, "majority": 0.5}) == {
        "matthews": None
    }
