"""Claims about `adapterbank soup`: packages of one start become their average, and all others are refused."""

from __future__ import annotations

import numpy as np
import pytest

from adapterbank.api.opened import open_bank
from adapterbank.errors import AdapterbankError, InputError
from adapterbank.studies import soup
from small_data import FAST, pairs, reviews, shell, snapshot

ROWS, PAIRS = reviews(), pairs()
OPTIONS = {**FAST, "few": "never"}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def versions(bank, *changes, rows=ROWS, task="s"):
    """Train a version for each of these changes to the options; return their names."""
    return [bank.train(task, rows, rows, **_used({**OPTIONS, **change})).package.ref for change in changes]


def _used(options):
    return {k: v for k, v in options.items() if k != "size" or options.get("method", "adapter") == "adapter"}


def test_the_tensors_are_the_mean_and_the_parents_are_named_by_checksum(bank):
    names = versions(bank, {"lr": 0.01}, {"lr": 0.02}, {"epochs": 1})
    parents = [bank.bank.get(name) for name in names]
    made = bank.soup(names)
    found = bank.bank.get("s")
    assert (found.ref, made.recipe["soup"]) == (
        "s@4",
        [{"package": one.ref, "weights_sha256": one.manifest.weights_sha256} for one in parents],
    )
    for name, tensor in found.tensors().items():
        np.testing.assert_allclose(tensor, np.mean([one.tensors()[name] for one in parents], axis=0), atol=1e-6)
    assert all(finding.ok and finding.how == "to the bit" for finding in bank.audit())
    assert made.method == parents[0].manifest.method
    assert made.params == parents[0].manifest.params
    assert "lr" not in made.recipe
    assert made.recipe["max_length"] == 32


def test_without_data_nothing_is_scored_and_with_data_it_is_and_calibrated(bank):
    names = versions(bank, {}, {"lr": 0.02}, rows=reviews(120))
    bare = bank.soup(names)
    assert (bare.metrics, "dev" in bare.data, bare.task.get("temperature")) == ({}, False, None)
    scored = bank.soup(names, data=reviews(120))
    assert scored.metrics["dev"]["accuracy"] == bank.evaluate("s", reviews(120))["accuracy"]
    assert (scored.data["dev"]["rows"], scored.data["train"]["rows"]) == (120, 120)
    assert scored.task["temperature"]
    assert bank.rollback("s") == 3


def test_an_average_that_scores_lower_is_noted_and_not_served_if_the_better_one_is_wanted(bank, monkeypatch):
    monkeypatch.setattr(soup, "average", lambda parts: parts[0])
    wrong = [(text, "negative" if label == "positive" else "positive") for text, label in ROWS]
    fitting = {**OPTIONS, "epochs": 8, "labels": "negative,positive"}
    for rows in (wrong, ROWS):
        bank.train("s", rows, ROWS, **fitting)
    kept = bank.soup(["s@1", "s@2"], data=ROWS, default="better")
    assert any(note.endswith("of s@2, which remains the default.") for note in kept.notes)
    assert (kept.version, bank.show("s").version) == (3, 2)
    assert any("which it replaces" in note for note in bank.soup(["s@1", "s@2"], data=ROWS).notes)
    assert bank.show("s").version == 4
    with pytest.raises(InputError, match="default is 'best'"):
        bank.soup(["s@1", "s@2"], default="best")


def test_the_outputs_of_averaged_linear_heads_are_averaged(bank):
    names = [*versions(bank, {"method": "feature"}), *versions(bank, {"method": "feature"}, rows=ROWS[4:])]
    made = bank.soup([*names], name="both")
    heads = [bank.bank.get(name).tensors()["head.weight"] for name in names]
    np.testing.assert_allclose(bank.bank.get(made.name).tensors()["head.weight"], sum(heads) / 2, atol=1e-6)


@pytest.mark.parametrize("method", ["layernorm", "ia3", "bitfit", "top", "full"])
def test_methods_that_draw_nothing_below_the_head_have_one_start_for_all_seeds(bank, method):
    names = versions(bank, {"method": method, "seed": 0}, {"method": method, "seed": 1})
    assert bank.soup(names).version == 3


def test_runs_that_started_from_one_package_have_one_start_for_all_seeds(bank):
    versions(bank, {}, task="source")
    names = versions(bank, {"start_from": "source", "seed": 0}, {"start_from": "source@1", "seed": 1})
    made = bank.soup(names)
    assert made.recipe["start_from"]["package"] == "source@1"
    more = versions(bank, {"start_from": "source", "seed": 2})
    assert len(bank.soup(["s@3", *more]).recipe["soup"]) == 2  # a soup has the start of its parts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"seed": 0}, {"seed": 1}], r"s@1 and s@2 cannot be averaged: the new tensors of their slots were drawn from "
                                     r"the seeds 0 and 1, which are different starts; use one seed"),
        ([{}, {"sigma": 0.5}], r"the new tensors of their slots were drawn"),
        ([{}, {"size": 8}], r"their slots or heads have different forms; use the same method, options and labels"),
        ([{}, {"method": "lora"}], r"their slots or heads have different forms"),
        ([{}, {"max_length": 16}], r"they read texts with another max_length; use the same for each"),
        ([{}, {"start_from": "s@1"}], r"began at different starts, new tensors and s@1; train each with the same"),
        ([{}, {"labels": "positive,negative"}], r"their tasks differ in labels; average versions of one task"),
        ([{}, {"metric": "macro_f1"}], r"their tasks differ in metric"),
        (
            [{"method": "layernorm", "head_hidden": 4}, {"method": "layernorm", "head_hidden": 4, "seed": 1}],
            r"the hidden layers of their heads were drawn from the seeds 0 and 1",
        ),
    ],
)  # fmt: skip
def test_packages_without_one_start_or_of_another_form_are_refused_in_one_sentence(bank, changes, message):
    names = versions(bank, *changes)
    before = snapshot(bank.path)
    with pytest.raises(InputError, match=message) as caught:
        bank.soup(names)
    assert str(caught.value).count("\n") == 0
    assert snapshot(bank.path) == before


def test_packages_that_are_one_missing_or_damaged_are_refused(bank):
    names = versions(bank, {}, {"lr": 0.02})
    for given in ([], names[:1], [names[0], names[0]], [names[1], "s"]):
        with pytest.raises(InputError, match="A soup needs two packages or more, each of them once; these are"):
            bank.soup(given)
    with pytest.raises(AdapterbankError, match="'s' has no version 9"):
        bank.soup([names[0], "s@9"])
    weights = bank.bank.get("s@2").path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(AdapterbankError, match="has been changed"):
        bank.soup(names)


def test_versions_of_two_tasks_need_a_name(bank):
    names = [*versions(bank, {}), *versions(bank, {"lr": 0.02}, task="other")]
    with pytest.raises(InputError, match=r"are of the tasks other and s; name the new version's task with --as\."):
        bank.soup(names)
    made = bank.soup(names, name="glue/rte")
    assert (made.name, made.version, made.task["name"]) == ("glue-rte", 1, "glue-rte")
    assert bank.predict("glue/rte", ["the cat was good"])[0].label in ("negative", "positive")


def test_numbers_of_one_scale_are_averaged_and_shown(bank):
    names = versions(bank, {}, {"lr": 0.02}, rows=PAIRS, task="pair")
    bank.soup(names, data=PAIRS)
    shown = shell("show", "--bank", bank.path, "--task", "pair").out
    assert "average of" in shown
    assert "The average of pair@1, pair@2." in shown
