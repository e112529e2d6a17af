"""Promise: with windows nothing of a text is lost, and its windows count together in training and in answers."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from adapterbank.api.files import FileOptions, predict_texts
from adapterbank.api.opened import open_bank
from adapterbank.errors import ConfigError, PackageDamaged
from adapterbank.inference.rows import WEIGHTS, Rows, Windows, make_rows
from adapterbank.slots.heads import pool_windows
from adapterbank.tasks.profile import lose_much
from adapterbank.tasks.spec import Examples
from adapterbank.training.builder import are_long
from small_data import FAST, NOUNS, reviews, write

SHORT = {**FAST, "max_length": 12, "epochs": 12}
FILLER = "the big red cat sat on the lazy mat and "


def long_rows(count: int = 24) -> list[tuple[str, str]]:
    """Return texts whose label depends on their last word, far beyond a window of 12 tokens."""
    return [(FILLER * (1 + i % 3) + text, label) for i, (text, label) in enumerate(reviews(count))]


def few(rows):
    return [(f"{text} {NOUNS[k % 6]}", label) for k, (text, label) in enumerate(rows)]


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


# --- pooling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "weights"])
def test_torch_and_numpy_pool_alike(pooling):
    draw = np.random.default_rng(0)
    owners = [0, 0, 0, 1, 2, 2]
    outputs = draw.normal(size=(6, 4)).astype(np.float32)
    rows = Rows([None] * 6, None, owners=owners, pooling=pooling)
    found = pool_windows(torch.from_numpy(outputs), torch.tensor(owners), 3, weighs=pooling == WEIGHTS)
    np.testing.assert_allclose(found, rows.pool(outputs), rtol=1e-5)
    parts = [outputs[:3], outputs[3:4], outputs[4:]]
    if pooling == "mean":
        np.testing.assert_allclose(rows.pool(outputs), [part.mean(0) for part in parts], rtol=1e-5)
    else:
        shares = [np.exp(part[:, -1:]) / np.exp(part[:, -1:]).sum() for part in parts]
        wanted = [(part[:, :-1] * share).sum(0) for part, share in zip(parts, shares, strict=True)]
        np.testing.assert_allclose(rows.pool(outputs), wanted, rtol=1e-5)


def test_places_without_rows_are_finite_and_have_no_gradient():
    x = torch.randn(4, 3, requires_grad=True)
    found = pool_windows(x, torch.tensor([0, 0, 9, 9]), 2, weighs=False)
    assert found.isfinite().all()
    found[0].sum().backward()
    assert x.grad[:2].abs().sum() > 0 == x.grad[2:].abs().sum()


# --- training and answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "weights"])
def test_windows_learn_from_the_end_of_a_text_and_cut_does_not(bank, pooling):
    rows = long_rows()
    options = {**SHORT, "few": "never"}
    cut = bank.train("cut", rows, rows, **options, long="cut")
    windows = bank.train("windows", rows, rows, **options, long="windows", window_pooling=pooling)
    assert windows.record["metrics"]["dev"]["accuracy"] > 0.9 > cut.record["metrics"]["dev"]["accuracy"]
    (one,) = bank.predict("windows", [rows[2][0]])
    assert (one.windows, one.truncated) == (5, None)
    assert one.to_json()["windows"] == 5
    (one,) = bank.predict("cut", [rows[2][0]])
    assert (one.windows, one.truncated) == (None, True)


@pytest.mark.parametrize("pooling", ["mean", "weights"])
def test_a_package_with_windows_answers_as_trained_after_loading(bank, bert, pooling):
    rows = long_rows()
    result = bank.train("w", rows, rows, **SHORT, few="never", long="windows", window_pooling=pooling)
    again = open_bank(bank.path, bert, device="cpu")
    assert again.evaluate("w", rows)["accuracy"] == result.record["metrics"]["dev"]["accuracy"]
    assert all(finding.ok for finding in again.audit())
    assert result.package.manifest.recipe["windows"] == 8
    assert result.package.manifest.method["head"]["weighs"] == (pooling == "weights")


def test_a_text_has_the_same_answer_alone_and_beside_others_of_other_tasks(bank):
    rows = long_rows()
    bank.train("w", rows, rows, **SHORT, few="never", long="windows", window_pooling="weights")
    bank.train("plain", reviews(), reviews(), **FAST)
    bank.train("number", [(t, 0.5 + len(t)) for t, _ in rows], **SHORT, long="windows")
    texts = [text for text, _ in rows[:6]]
    names = ["w", "plain", "number"] * 2
    together = bank.predict(names, texts)
    for name, text, found in zip(names, texts, together, strict=True):
        (alone,) = bank.predict(name, [text])
        if name == "number":
            assert found.value == pytest.approx(alone.value, abs=1e-4)
        else:
            assert found.label == alone.label
            assert found.probabilities == pytest.approx(alone.probabilities, abs=1e-5)


@pytest.mark.parametrize("method", ["adapter", "full", "top", "feature", "lora", "layernorm"])
def test_every_method_reads_windows(bank, method):
    rows = long_rows()
    own = {"size": 4} if method == "adapter" else {}
    options = {name: value for name, value in SHORT.items() if name != "size"} | {"epochs": 2} | own
    result = bank.train("w", rows, rows, **options, method=method, few="never", long="windows")
    assert result.package.manifest.recipe["windows"] == 8
    assert [bool(one.windows) for one in bank.predict("w", [rows[2][0], "the cat"])] == [True, False]


@pytest.mark.parametrize("kind", ["multilabel", "regression", "pairs"])
def test_other_kinds_and_pairs_read_windows(bank, kind):
    texts = [text for text, _ in long_rows()]
    rows = {
        "multilabel": [{"text": text, "labels": [["red"], [], ["red", "big"]][k % 3]} for k, text in enumerate(texts)],
        "regression": [{"text": text, "label": 0.5 + k % 4} for k, text in enumerate(texts)],
        "pairs": [{"text": text, "pair": FILLER, "label": ("no", "yes")[k % 2]} for k, text in enumerate(texts)],
    }[kind]
    options = {"text": "text", "text_pair": "pair"} if kind == "pairs" else {}
    for pooling in ("mean", "weights"):
        bank.train(
            "w", rows, rows, **SHORT | {"epochs": 2}, few="never", long="windows", window_pooling=pooling, **options
        )
        (one,) = bank.predict("w", [texts[2]], pairs=[FILLER] if kind == "pairs" else None)
        assert one.windows >= 4


def test_few_labels_are_fitted_on_the_mean_of_windows(bank):
    rows = long_rows()
    result = bank.train("w", rows, max_length=12, size=4, long="windows")
    assert result.record["fitted"]["rows"] == len(rows)
    assert len(bank.predict("w", rows)) == len(rows)
    assert bank.evaluate("w", rows)["accuracy"] > 0.6


def test_parts_of_a_step_keep_texts_whole_and_give_the_same_gradients(bank, monkeypatch):
    rows = long_rows()
    options = {**SHORT, "few": "never", "long": "windows", "epochs": 2}
    whole = bank.train("whole", rows, rows, **options).record["history"]
    monkeypatch.setattr("adapterbank.training.trainer.token_limit", lambda *_: 60)
    parts = bank.train("parts", rows, rows, **options).record["history"]
    assert [one["loss"] for one in parts] == pytest.approx([one["loss"] for one in whole], rel=1e-4)


# --- the choice and its bounds --------------------------------------------------------------------------------


def test_windows_are_the_default_where_many_texts_would_lose_much(bank):
    rows = long_rows()
    result = bank.train("w", rows, rows, **SHORT | {"epochs": 1}, few="never")
    assert (result.record.get("windows"), result.package.manifest.recipe["windows"]) == (8, 8)
    assert "long" not in result.record["config"]  # it is what was asked for, so that a study finds its runs
    assert any("read in windows" in note and "--long cut" in note for note in result.notes)
    rarely = reviews(60) + long_rows(24)[2:6:3]
    result = bank.train("r", rarely, rarely, **SHORT | {"epochs": 1}, few="never")
    assert "windows" not in result.record
    assert any("--long windows" in note for note in result.notes)


def test_more_windows_than_the_limit_are_told_and_marked(bank):
    rows = long_rows()
    result = bank.train("w", rows, rows, **SHORT | {"epochs": 1}, few="never", long="windows", max_windows=2)
    assert any("longer than 2 windows" in note for note in result.notes)
    (one,) = bank.predict("w", [rows[2][0]])
    assert (one.windows, one.truncated) == (2, True)


def test_a_fitted_head_cannot_weigh_windows(bank):
    with pytest.raises(ConfigError, match="window_pooling is 'weights', but a fitted head cannot weigh windows"):
        bank.train("w", long_rows(), max_length=12, few="always", long="windows", window_pooling="weights")
    with pytest.raises(ConfigError, match="but long is 'cut'"):
        bank.train("w", long_rows(), max_length=12, long="cut", window_pooling="weights")


def test_rows_with_windows_come_from_the_cache_as_they_were(bert, tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTERBANK_CACHE", str(tmp_path))
    examples = Examples([text for text, _ in long_rows(1200)], None, [0] * 1200)
    options = {"kind": "classification", "max_length": 12, "windows": Windows(3)}
    plain = make_rows(bert, examples, **options)
    kept = [make_rows(bert, examples, keep=True, **options) for _ in range(2)]
    for rows in kept:
        assert (rows.owners, rows.cut, rows.units, rows.pooling) == (plain.owners, plain.cut, 1200, "mean")
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(rows.tokens, plain.tokens, strict=True))


def test_a_document_task_may_be_cut(bank):
    rows = [{"tokens": (FILLER * 3).split(), "tags": ["X" if w == "cat" else "Y" for w in (FILLER * 3).split()]}] * 4
    bank.train("t", rows, rows, **SHORT | {"epochs": 1}, long="cut")
    (one,) = bank.predict("t", [rows[0]["tokens"]])
    assert (len(one.tags), one.truncated) == (len(rows[0]["tokens"]), True)
    bank.train("t", rows, rows, **SHORT | {"epochs": 1})
    (one,) = bank.predict("t", [rows[0]["tokens"]])
    assert one.truncated is None


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_tasks_that_read_the_same_texts_and_pool_them_differently_share_no_rows(bank, kind, tmp_path):
    rows = [(text, label if kind == "classification" else 0.5 + len(text)) for text, label in long_rows()]
    for pooling in ("mean", "weights"):
        bank.train(pooling, rows, rows, **SHORT, few="never", long="windows", window_pooling=pooling)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in rows[:4]))
    for order in (["mean", "weights"], ["weights", "mean"]):
        bank.predict_file(order, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        for name in order:
            for row, alone in zip(found, bank.predict(name, [text for text, _ in rows[:4]]), strict=True):
                field = "value" if kind == "regression" else "label"
                wanted = getattr(alone, field)
                assert row[f"{name}.{field}"] == (pytest.approx(wanted, rel=1e-5) if kind == "regression" else wanted)


def test_the_spread_of_the_labels_does_not_change_how_windows_are_weighed(bank):
    texts = [text for text, _ in long_rows()]
    options = {**SHORT, "kind": "regression", "long": "windows", "window_pooling": "weights"}
    losses = []
    for spread in (1.0, 1e4):
        rows = [(text, spread * (0.5 + k % 4)) for k, text in enumerate(texts)]
        losses.append([one["loss"] for one in bank.train("w", rows, rows, **options).record["history"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_study_finds_its_runs_where_the_choice_is_left_to_it(bank, tmp_path):
    write(tmp_path / "rows.csv", long_rows())
    study = {"task": "w", "train": str(tmp_path / "rows.csv"), "few": "never", "lr": [0.01, 0.02], "seeds": 1}
    study |= {**{name: value for name, value in SHORT.items() if name != "lr"}, "epochs": 1}
    study["select"] = {"per": ["task"], "by": "mean", "seeds": 2}
    first = bank.sweep(study)
    assert first.progress.done == 3
    assert bank.sweep(study).progress.left == 0
    assert len(list((bank.path / "records").glob("*.json"))) == 3


def test_a_table_of_texts_has_a_column_of_windows_whatever_the_first_text(bank, tmp_path):
    rows = long_rows()
    bank.train("w", rows, rows, **SHORT, few="never", long="windows")
    predict_texts(bank, ["w"], ["the cat", rows[2][0]], None, tmp_path / "out.csv", FileOptions())
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert [row["windows"] for row in csv.DictReader(lines)] == ["", "5"]


def test_a_forged_head_that_weighs_windows_it_does_not_read_is_refused(bank):
    package = bank.train("w", long_rows(), long_rows(), **SHORT, few="never", long="windows").package
    recipe = {name: value for name, value in package.manifest.recipe.items() if name != "windows"}
    forged = replace(package, manifest=replace(package.manifest, recipe=recipe))
    with pytest.raises(PackageDamaged, match="its head weighs windows that it does not read"):
        bank.engine.load(forged)


def test_texts_of_many_bytes_a_character_are_long_too(bert):
    texts = ["\N{GRINNING FACE}" * 20] * 20
    counted = [len(row) for row in bert.tokenize(texts)]
    assert are_long(bert, Examples(texts), 10) == (lose_much(counted, 10) == 20)
