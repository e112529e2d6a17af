"""`training.run`: from data of any form to a package and a record, with notes and refusals."""

from __future__ import annotations

import math
import re

import pytest
import torch

from adapterbank.api.opened import open_bank
from adapterbank.encoder.backbone import load
from adapterbank.errors import ConfigError, DataError, InputError, TrainingError
from adapterbank.inference.predictions import Prediction
from adapterbank.methods import METHODS
from adapterbank.runtime import stamp
from adapterbank.storage import records
from adapterbank.training import run as runs
from small_data import FAST, answers, flags, pairs, reviews, scores, shell, snapshot, tags, write

ROWS = reviews()
SLOTS = [name for name, row in METHODS.items() if row.slot and "fuse" not in row.uses]
"""Methods that need no other task."""
SITES = [f"layers.{i}.{site}" for i in range(3) for site in ("attention", "feedforward")]


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def quick(method="adapter", **options):
    """Return the options of a short training; the size only if the method has one."""
    chosen = {**FAST, "method": method, **options}
    return chosen if method == "adapter" else {k: v for k, v in chosen.items() if k != "size"}


# --- where the rows come from -------------------------------------------------------------------------------


def test_every_format_and_every_python_form_of_the_same_rows_gives_the_same_weights(tmp_path, bank):
    texts, labels = zip(*ROWS, strict=True)
    forms = {
        "tuples": ROWS,
        "lists": [list(row) for row in ROWS],
        "dicts": [{"text": text, "label": label} for text, label in ROWS],
        "columns": {"text": list(texts), "label": list(labels)},
    }
    for ending in ("csv", "tsv", "jsonl", "json", "parquet", "csv.gz"):
        forms[ending] = write(tmp_path / f"train.{ending}", ROWS)
    forms["path as text"] = str(forms["csv"])
    found = {}
    for name, form in forms.items():
        result = bank.train("same", form, dev=form, **{**FAST, "epochs": 1})
        found[name] = (result.package.manifest.weights_sha256, result.record["config"]["data"]["train"]["sha256"])
    assert set(found.values()) == {found["tuples"]}


class Frame:
    """The relevant parts of a data frame: it returns its columns and has no truth value."""

    def to_dict(self, orient=None):
        return {"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}

    def __bool__(self):
        raise ValueError("The truth value of a DataFrame is ambiguous.")


def test_a_data_frame_is_read_like_a_dict_of_columns(bank):
    frame = bank.train("frame", Frame(), dev=Frame(), **FAST).package.manifest
    assert frame.weights_sha256 == bank.train("list", ROWS, ROWS, **FAST).package.manifest.weights_sha256


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_an_empty_list_is_refused_rather_than_ignored(bank, split):
    splits = {"train": ROWS, "dev": ROWS, "test": ROWS, split: []}
    with pytest.raises(DataError, match=f"{split} has no rows"):
        bank.train("empty", splits["train"], splits["dev"], splits["test"], **FAST)


def test_columns_can_be_chosen_by_name(tmp_path, bank):
    file = write(tmp_path / "odd.csv", [(i, text, label) for i, (text, label) in enumerate(ROWS)], ("id", "said", "is"))
    result = bank.train("named", file, text="said", label="is", labels="positive,negative", **FAST)
    assert result.record["task"]["text"] == ["said"]
    assert result.record["task"]["labels"] == ["positive", "negative"]


def test_without_dev_a_seeded_stratified_tenth_is_held_out(bank):
    rows = [(f"{text} {i}", "rare" if i % 4 == 0 else "common") for i, (text, _) in enumerate(reviews(80))]
    found = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        record = bank.train(name, rows, **quick("layernorm", epochs=1, seed=seed)).record
        found[name] = record["config"]["data"]["dev"]["sha256"]
        assert record["config"]["data"]["train"]["rows"] == 72
        assert [row["support"] for row in record["metrics"]["dev"]["classes"].values()] == [2, 6]
        assert "No dev data given: 8 of 80 training rows are held out for it." in record["notes"]
    assert found["a"] == found["b"] != found["c"]


def test_dev_data_that_chooses_nothing_is_scored_once_at_the_end(bank):
    rows = [(f"{text} {i}", label) for i, (text, label) in enumerate(reviews(80))]
    held_out = bank.train("plain", rows, **quick("layernorm", epochs=3)).record
    found = bank.train("careful", rows, ROWS, ROWS[:8], choose_on="train", **quick("layernorm", epochs=3)).record
    assert "Dev data chooses nothing: 8 of 80 training rows are held out for it." in found["notes"]
    data = found["config"]["data"]
    assert {name: one["rows"] for name, one in data.items()} == {
        "train": 72, "dev": 8, "validation": len(ROWS), "test": 8,
    }  # fmt: skip
    # What is given as dev changes neither the run nor what is chosen.
    assert (found["history"][0]["score"], found["best_epoch"]) == (
        held_out["history"][0]["score"],
        held_out["best_epoch"],
    )
    assert found["metrics"]["dev"]["accuracy"] == held_out["metrics"]["dev"]["accuracy"]
    scored = bank.evaluate("careful", ROWS)
    assert found["metrics"]["validation"]["accuracy"] == scored["accuracy"]


def test_few_labels_with_dev_data_that_chooses_nothing_hold_nothing_out(bank):
    found = bank.train("few", ROWS, ROWS, choose_on="train", max_length=32).record
    assert set(found["config"]["data"]) == {"train", "validation"}
    assert found["config"]["data"]["train"]["rows"] == len(ROWS)
    assert {"dev", "validation"} <= set(found["metrics"])


def test_the_seed_decides_which_rows_a_limit_draws(bank):
    found = [bank.train("few", ROWS, ROWS, **quick("feature", limit=10, seed=s)).record for s in (0, 0, 1)]
    assert [record["config"]["data"]["train"]["rows"] for record in found] == [10, 10, 10]
    first, again, other = (record["config"]["data"]["train"]["sha256"] for record in found)
    assert first == again != other
    assert "Training on 10 rows drawn with seed 0." in found[0]["notes"]


def test_a_limit_that_leaves_one_class_is_refused(bank):
    with pytest.raises(DataError, match=r"only one class of 'few'; raise --limit"):
        bank.train("few", ROWS, ROWS, **quick("feature", limit=1))


# --- the record and the package -----------------------------------------------------------------------------


def test_a_run_writes_one_record_with_all_measurements(bank, bert):
    result = bank.train("s", ROWS, ROWS, reviews(8), **FAST)
    record = result.record
    assert records.read(result.record_path) == record
    assert set(record) == {
        *("config", "package", "task", "metrics", "params", "bytes", "best_epoch", "history"),
        *("seconds", "examples_per_second", "stamp", "notes", "created", "calibration"),
    }
    assert record["package"] == result.package.ref == "s@1"
    assert record["config"]["backbone_sha256"] == bert.sha256
    assert [split["rows"] for split in record["config"]["data"].values()] == [24, 24, 8]
    assert {**record["config"], **FAST} == record["config"]
    assert record["config"]["weight_decay"] == METHODS["adapter"].defaults["weight_decay"].value
    assert record["stamp"] == stamp(bank.engine.device, bank.engine.dtype)
    assert record["bytes"] == (result.package.path / "weights.safetensors").stat().st_size
    assert record["params"]["encoder"] == bert.parameters
    assert 0 < sum(epoch["seconds"] for epoch in record["history"]) < record["seconds"]
    assert record["examples_per_second"] > 0
    assert [set(epoch) for epoch in record["history"]] == [{"loss", "score", "seconds"}] * 2
    assert all(math.isfinite(epoch["loss"]) for epoch in record["history"])
    assert record["metrics"]["dev"]["accuracy"] == max(epoch["score"] for epoch in record["history"])
    assert record["history"][record["best_epoch"] - 1]["score"] == record["metrics"]["dev"]["accuracy"]


def test_the_scores_on_test_data_equal_those_of_evaluate(bank):
    result = bank.train("s", ROWS, ROWS, reviews(8), **FAST)
    again = bank.evaluate("s", reviews(8))
    scored = result.record["metrics"]["test"]
    assert scored["rows"] == 8
    assert {name: again[name] for name in scored} == scored
    assert result.package.manifest.metrics["test"]["accuracy"] == scored["accuracy"]


LONGER = {**FAST, "epochs": 4}


def test_held_out_rows_set_the_temperature_unless_told_not_to(bank):
    rows = [(text, label if i % 5 else "positive") for i, (text, label) in enumerate(reviews(80))]
    fitted = bank.train("s", rows, rows, reviews(60), **LONGER)
    plain = bank.train("plain", rows, rows, reviews(60), **LONGER, calibrate=False)
    assert fitted.package.manifest.task["temperature"] > 0
    assert "temperature" not in plain.package.manifest.task
    assert fitted.record["history"][-1]["score"] == plain.record["history"][-1]["score"]
    assert fitted.record["metrics"]["dev"]["accuracy"] == plain.record["metrics"]["dev"]["accuracy"]
    assert fitted.package.manifest.weights_sha256 == plain.package.manifest.weights_sha256
    assert "calibrate" not in fitted.record["config"]
    assert plain.record["config"]["calibrate"] is False
    found = bank.evaluate("s", reviews(60))
    assert found["calibration_error"] == fitted.record["metrics"]["test"]["calibration_error"]
    assert found["reliability"] == fitted.record["calibration"]["test"]["reliability"]
    assert found["coverage"] == fitted.record["calibration"]["test"]["coverage"]
    assert fitted.package.manifest.metrics["test"]["calibration_error"] == found["calibration_error"]


def test_dev_is_scored_without_the_thresholds_that_were_chosen_on_it(bank):
    noisy = [{"text": text, "labels": ["odd"] if i % 5 == 0 else []} for i, (text, _) in enumerate(reviews(90))]
    result = bank.train("t", noisy, noisy, noisy, kind="multilabel", labels="odd", metric="micro_f1", **FAST)
    record = result.record
    assert len(record["task"]["thresholds"]) == 1
    assert record["metrics"]["dev"]["micro_f1"] == record["history"][record["best_epoch"] - 1]["score"]
    assert record["calibration"]["dev"]["with_thresholds"] == record["metrics"]["test"]["micro_f1"]
    assert record["metrics"]["test"]["micro_f1"] > record["metrics"]["dev"]["micro_f1"]
    assert bank.evaluate("t", noisy)["micro_f1"] == record["metrics"]["test"]["micro_f1"]


def test_a_repeated_run_gets_a_second_record_and_a_second_version(bank):
    first, second = (bank.train("s", ROWS, ROWS, **FAST) for _ in range(2))
    assert (first.package.ref, second.package.ref) == ("s@1", "s@2")
    assert second.record_path.name == first.record_path.stem + ".2.json"
    assert records.read(first.record_path)["package"] == "s@1"


def expected_names(method, backbone):
    """Return the names that a package must have, from the papers and not from the code's table."""
    both = ("weight", "bias")
    head = {f"head.{kind}" for kind in both}
    norms = {name for name in backbone.tensors if ".norm." in name}
    inner = {f"{site}.adapter.{part}.{kind}" for site in SITES for part in ("down", "up") for kind in both}
    return (
        head
        | {
            "adapter": inner | norms,
            "layernorm": norms,
            "lora": {f"layers.{i}.attention.{t}.lora.{k}" for i in range(3) for t in ("query", "value") for k in "ab"},
            "ia3": {
                f"layers.{i}.{site}.ia3.scale"
                for i in range(3)
                for site in ("attention.key", "attention.value", "feedforward.inner")
            },
            "bitfit": {name for name in backbone.tensors if name.endswith(".bias") and not name.startswith("pooler")},
            "feature": set(),
            "full": {name for name in backbone.tensors if not name.startswith("pooler")},
            "top": {name for name in backbone.tensors if name.startswith("layers.2.")},
        }[method]
    )


@pytest.mark.parametrize("method", SLOTS)
def test_exactly_what_trains_is_saved_and_counted(bank, bert, method):
    result = bank.train("s", ROWS, ROWS, **quick(method))
    saved = result.package.tensors()
    assert set(saved) == expected_names(method, bert)
    params = result.record["params"]
    assert params["trained"] == sum(array.size for array in saved.values())
    new = sum(array.size for name, array in saved.items() if name not in bert.tensors)
    assert params["total"] == bert.parameters + new
    assert params["percent"] == pytest.approx(100 * params["trained"] / bert.parameters)
    assert any(
        (array != bert.tensors[name].numpy()).any() for name, array in saved.items() if name in bert.tensors
    ) == (method not in ("feature", "lora", "ia3"))


@pytest.mark.parametrize(("size", "classes"), [(4, 2), (7, 3)])
def test_an_adapters_trained_parameters_equal_the_formula(bank, size, classes):
    rows = [(text, f"class {i % classes}") for i, (text, _) in enumerate(ROWS)]
    trained = bank.train("s", rows, rows, **{**FAST, "size": size}).record["params"]["trained"]
    hidden, sites, norms = 32, 6, 7
    assert trained == sites * (2 * size * hidden + hidden + size) + norms * 2 * hidden + (hidden + 1) * classes


def test_training_never_writes_the_encoder(bank, bert, checkpoint):
    before = {name: tensor.clone() for name, tensor in bert.tensors.items()}
    for method in SLOTS:
        bank.train(method, ROWS, ROWS, **quick(method))
    assert all(torch.equal(tensor, before[name]) for name, tensor in bert.tensors.items())
    assert load(str(checkpoint("bert")[0])).sha256 == bert.sha256


def test_training_a_task_does_not_change_the_files_of_others(bank):
    bank.train("first", ROWS, ROWS, **FAST)
    before = snapshot(bank.path / "tasks" / "first")
    for name in ("second", "third"):
        bank.train(name, ROWS, ROWS, **FAST, seed=1)
    assert snapshot(bank.path / "tasks" / "first") == before


@pytest.mark.parametrize("method", ["adapter", "full"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_different_ones(bank, method):
    same, again, other = (
        bank.train("s", ROWS, ROWS, **quick(method, seed=s)).package.manifest.weights_sha256 for s in (5, 5, 6)
    )
    assert same == again != other


# --- kinds of task ------------------------------------------------------------------------------------------


def test_regression_from_rows_to_numbers(bank):
    record = bank.train("score", scores(), scores(), **FAST).record
    assert record["task"]["kind"] == "regression"
    assert set(record["metrics"]["dev"]) >= {"pearson", "spearman", "rows"}
    answer = bank.predict("score", [ROWS[0][0]])[0]
    assert set(answer.to_json()) == {"value"}
    assert 0 < answer.value < 4  # the labels are between 0.5 and 3.5, and the head starts at their mean


def test_integer_labels_are_regression_only_if_the_kind_is_given(bank):
    rows = [(text, i % 4) for i, (text, _) in enumerate(ROWS)]
    assert bank.train("a", rows, rows, **FAST).record["task"]["labels"] == ["0", "1", "2", "3"]
    assert bank.train("b", rows, rows, kind="regression", **FAST).record["task"]["kind"] == "regression"


def test_multilabel_from_rows_to_labels(bank):
    record = bank.train("tags", tags(), tags(), **FAST).record
    assert (record["task"]["kind"], record["task"]["labels"]) == ("multilabel", ["red", "big"])
    assert set(record["metrics"]["dev"]) >= {"micro_f1", "macro_f1", "subset_accuracy"}
    answer = bank.predict("tags", [ROWS[0][0]])[0]
    assert answer.labels == tuple(name for name, p in answer.probabilities.items() if p > 0.5)


def test_pairs_from_rows_to_labels(bank):
    record = bank.train("pair", pairs(), pairs(), **FAST).record
    assert record["task"]["text"] == ["text", "text_pair"]
    first, second = (bank.predict("pair", ["the cat"], [text])[0].probabilities for text in ("a big dog", "no"))
    assert first != second
    assert set(first) == {"no", "yes"}


def test_spans_from_rows_to_answers(bank):
    record = bank.train("span", answers(), answers(), **FAST).record
    assert record["task"]["kind"] == "span"
    assert set(record["metrics"]["dev"]) >= {"span_f1", "exact_match"}
    context = ROWS[0][0]
    answer = bank.predict("span", ["what was it"], [context])[0]
    assert answer == Prediction(answer=context[answer.start : answer.end], start=answer.start, end=answer.end)
    assert answer.answer != ""


def test_balanced_class_weights_give_each_class_the_same_total_weight(bank, monkeypatch):
    jobs = []
    real = runs.train
    monkeypatch.setattr(runs, "train", lambda *a, **o: jobs.extend(a[1]) or real(*a, **o))
    rows = [(text, "rare" if i % 4 == 0 else "common") for i, (text, _) in enumerate(ROWS)]
    found = [bank.train("s", rows, rows, **FAST, class_weights=how).package for how in ("none", "balanced")]
    plain, balanced = (job.class_weights for job in jobs)
    assert plain is None
    assert balanced == pytest.approx((24 / (2 * 6), 24 / (2 * 18)))
    assert found[0].manifest.weights_sha256 != found[1].manifest.weights_sha256
    assert found[1].manifest.recipe["class_weights"] == "balanced"


def test_class_weights_are_refused_for_regression(bank):
    with pytest.raises(ConfigError, match="class_weights is 'balanced', but the task is regression; leave it out"):
        bank.train("score", scores(), scores(), class_weights="balanced", **FAST)


# --- notes --------------------------------------------------------------------------------------------------


def test_texts_that_are_cut_are_counted(bank):
    rows = [*ROWS, (" ".join(["cat"] * 40), "positive"), (" ".join(["dog"] * 40), "negative")]
    reported = []
    result = bank.train("s", rows, ROWS, note=reported.append, **FAST)
    assert (
        reported[0]
        == "2 of 26 training texts are longer than max_length 32 and are cut; --long windows reads them whole."
    )
    assert list(result.notes) == result.record["notes"] == reported


def test_a_longer_document_becomes_windows_and_is_counted(bank):
    far = {"question": "what was it", "context": " ".join(["cat"] * 40) + " fox", "answer": "fox"}
    notes = bank.train("span", [*answers(), far], answers(), **FAST).notes
    # 26 tokens of a window are the document's; 41 are covered by windows that begin at 0, 13 and 26
    note = (
        "1 of 25 training documents are longer than 32 tokens with their question and are cut into overlapping windows"
    )
    assert f"{note}: 27 rows in all." in notes


def test_answers_longer_than_a_window_are_counted_and_left_out(bank):
    long = {"question": "what was it", "context": " ".join(["cat"] * 60), "answer": " ".join(["cat"] * 50)}
    notes = bank.train("span", [*answers(), long], answers(), **FAST).notes
    assert "1 training rows are left out: their answer fits no window of 32 tokens." in notes


def test_empty_rows_are_counted_and_dropped(bank):
    result = bank.train("s", [*ROWS, ("", "positive"), ("  ", "negative")], ROWS, **FAST)
    assert result.notes[0] == "train: dropped 2 rows of 26 with an empty text (first: row 25)."
    assert result.record["config"]["data"]["train"]["rows"] == 24


def test_a_model_with_one_answer_to_everything_is_reported_with_the_remedy(bank):
    # Each rare row is also a common row twice, so that no model beats the majority baseline.
    rows = [*[(text, "common") for text, _ in ROWS] * 2, (ROWS[0][0], "rare"), (ROWS[1][0], "rare")]
    result = bank.train("s", rows, rows, **{**FAST, "epochs": 6, "lr": 0.03})
    note = result.notes[-1]
    assert re.match(r"The model predicts 'common' for every dev row: .*learning rate.* \(try a tenth of it\)", note)
    assert result.record["metrics"]["dev"]["accuracy"] == result.record["metrics"]["dev"]["majority"] == 48 / 50


# --- refusals -----------------------------------------------------------------------------------------------

DIVERGING = {**FAST, "lr": 10, "weight_decay": 10, "epochs": 20}


def test_a_loss_that_is_not_finite_stops_the_run_and_does_not_change_the_bank(bank):
    bank.train("s", ROWS, ROWS, **FAST)
    before = snapshot(bank.path, without=["runs"])
    with pytest.raises(TrainingError, match=r"The learning rate 10 is probably too high: try --lr 1\."):
        bank.train("s", ROWS, ROWS, **DIVERGING)
    assert snapshot(bank.path, without=["runs"]) == before


def test_the_shell_reports_divergence_in_one_line_and_exits_with_1(tmp_path, checkpoint):
    data, bank, encoder = write(tmp_path / "train.csv", ROWS), tmp_path / "bank", checkpoint("bert")[0]
    train = ["train", "--bank", bank, "--train", data, "--dev", data, "--backbone", encoder, "--task", "s"]
    assert shell(*train, *flags(FAST)).code == 0
    before = snapshot(bank, without=["runs"])
    found = shell(*train, *flags(DIVERGING))
    assert (found.code, found.out, len(found.err.splitlines())) == (1, "", 1)
    assert re.match(r"adapterbank: At step \d+, epoch \d+, the .* try --lr 1\. Nothing was written", found.err)
    assert snapshot(bank, without=["runs"]) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 65}, r"max_length is 65, but .* has 64 positions"),
        ({"layers": "0,3"}, r"layers is '0,3', but this backbone has layers 0 to 2"),
        ({"layers": "lowest"}, r"layers is 'lowest'; it must be 'all', 'upper', or numbers"),
        ({"method": "top", "top": 4}, r"top is 4, but this backbone has 3 layers; use 1 to 3"),
        ({"metric": "spearman"}, r"spearman"),
        ({"text": "said"}, r"no column 'said'"),
        ({"task": "a/b"}, r"'a/b' cannot be a task name"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_the_bank_is_created(bank, options, message):
    arguments = {**quick(options.get("method", "adapter")), "task": "s", "train": ROWS, "dev": ROWS, **options}
    with pytest.raises(InputError, match=message):
        bank.train(**arguments)
    assert not bank.path.exists()


def test_the_pooler_is_refused_if_the_encoder_has_none(tmp_path, tiny):
    with pytest.raises(ConfigError, match=r"pooling is 'pooler', but .* has no pooler; use first or mean"):
        open_bank(tmp_path / "bank", tiny("distilbert")).train("s", ROWS, ROWS, pooling="pooler", **FAST)


def test_a_dev_label_that_is_not_in_the_training_data_is_refused(bank):
    with pytest.raises(DataError, match=r"dev, row 25: the label 'odd' is not one of the task's 2 labels"):
        bank.train("s", ROWS, [*ROWS, ("the cat", "odd")], **FAST)
    assert not bank.path.exists()


@pytest.mark.parametrize(("count", "chosen"), [(9, False), (10, True)])
def test_fewer_than_ten_dev_rows_choose_no_epoch(bank, count, chosen):
    dev = [(text, {"positive": "negative", "negative": "positive"}[label]) for text, label in ROWS[:count]]
    result = bank.train("s", ROWS, dev, **{**FAST, "epochs": 6, "few": "never"})  # it gets worse by learning
    scores = [epoch["score"] for epoch in result.record["history"]]
    best = 1 + scores.index(max(scores))
    assert result.record["best_epoch"] == (best if chosen else 6)
    assert best < 6
    assert any("too few to choose an epoch" in note for note in result.notes) == (not chosen)
