"""Tests of `adapterbank.api.opened`: what users do from Python, also while another process uses the bank."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pandas
import pytest

import adapterbank
from adapterbank.api.opened import open_bank
from adapterbank.errors import (
    AdapterbankError,
    BackboneMismatch,
    BankError,
    ConfigError,
    DataError,
    InputError,
    PackageDamaged,
    UnknownName,
)
from adapterbank.storage import files
from adapterbank.tasks.examples import read_texts
from adapterbank.tasks.spec import Task
from families import save_random
from small_data import FAST, answers, flags, pairs, process, reviews, scores, snapshot, tags, write

ROWS = reviews()
TEXTS = [text for text, _ in reviews(8)] + ["why", "who is it, the lazy dog?", "a cat sat on the mat in the house"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint):
    """Create one bank with tasks of every kind and method; tests work on copies."""
    folder = tmp_path_factory.mktemp("api") / "bank"
    bank = open_bank(folder, str(checkpoint("bert")[0]), device="cpu")
    three = [(text, f"class {i % 3}") for i, (text, _) in enumerate(ROWS)]
    short = {name: value for name, value in FAST.items() if name != "size"}
    bank.train("sentiment", ROWS, ROWS, **FAST)
    bank.train("sentiment", ROWS, ROWS, **FAST, seed=1)
    bank.train("score", scores(), scores(), **{**FAST, "size": 7})
    bank.train("three", three, three, method="layernorm", **short)
    bank.train("tags", tags(), tags(), **FAST, placement="parallel")
    bank.train("whole", ROWS, ROWS, method="full", **short)
    bank.train("upper", three, three, method="top", **short, pooling="first")
    bank.train("head", ROWS, ROWS, method="feature", **short, head_hidden=5)
    bank.train("pair", pairs(), pairs(), **FAST)
    bank.train("span", answers(), answers(), **FAST)
    return folder


@pytest.fixture
def bank(made, tmp_path):
    return open_bank(shutil.copytree(made, tmp_path / "bank"))


def numbers(prediction):
    """Return the numbers of a prediction."""
    if prediction.embedding is not None:
        return prediction.embedding
    found = prediction.to_json()
    return np.array(list(found["probabilities"].values()) if "probabilities" in found else [found["value"]])


SINGLE = ("sentiment", "sentiment@1", "score", "three", "tags", "whole", "upper", "head", None)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_many_tasks_in_any_order_are_predicted_as_by_each_task_alone(bank, seed):
    alone = {(name, text): bank.predict(name, [text])[0] for name in SINGLE for text in TEXTS}
    rows = random.Random(seed).choices(list(alone), k=60)
    mixed = bank.predict([name for name, _ in rows], [text for _, text in rows])
    assert len(mixed) == len(rows)
    for row, found in zip(rows, mixed, strict=True):
        assert set(found.to_json()) == set(alone[row].to_json()), row
        np.testing.assert_allclose(numbers(found), numbers(alone[row]), atol=1e-5, err_msg=str(row))


def test_pairs_of_many_tasks_are_predicted_as_by_each_task_alone(bank):
    firsts, seconds, names = ["what was it"] * 6, TEXTS[:6], ["pair", "span", None, "span", None, "pair"]
    mixed = bank.predict(names, firsts, seconds)
    for i, name in enumerate(names):
        (alone,) = bank.predict(name, firsts[i : i + 1], seconds[i : i + 1])
        if name == "span":
            assert mixed[i] == alone
        else:
            np.testing.assert_allclose(numbers(mixed[i]), numbers(alone), atol=1e-5)


def test_predicting_with_none_returns_the_mean_of_the_last_hidden_states(bank, bert):
    (found,) = bank.predict(None, ["the cat sat"])
    np.testing.assert_allclose(found.embedding, bert.encode(["the cat sat"])[0].mean(0), atol=1e-5)


def test_a_prediction_has_a_label_and_probabilities_that_sum_to_one(bank):
    for answer in bank.predict("three", TEXTS):
        assert answer.label == max(answer.probabilities, key=answer.probabilities.get)
        assert list(answer.probabilities) == ["class 0", "class 1", "class 2"]
        assert sum(answer.probabilities.values()) == pytest.approx(1)


def test_no_texts_give_no_predictions(bank):
    assert bank.predict("sentiment", []) == []


def test_a_version_can_be_pinned_and_the_default_rolled_back(bank):
    first, second, default = (
        numbers(bank.predict(ref, TEXTS)[0]) for ref in ("sentiment@1", "sentiment@2", "sentiment")
    )
    assert (second == default).all()
    assert (first != default).any()
    assert bank.rollback("sentiment") == 1
    assert (numbers(bank.predict("sentiment", TEXTS)[0]) == first).all()
    assert bank.rollback("sentiment", to=2) == 2
    assert (numbers(bank.predict("sentiment", TEXTS)[0]) == second).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sentiment", "one text"), "texts is one string; pass a list of texts"),
        ((["sentiment"], TEXTS), "There are 11 texts but 1 tasks; pass one for each text"),
        (("pair", TEXTS, TEXTS[:2]), "There are 11 texts but 2 pairs; pass one for each text"),
        (("pair", TEXTS), "'pair' reads text and text_pair; pass a second text for every row"),
        (("sentiment", TEXTS, TEXTS), "'sentiment' reads text; pass no second texts"),
        (("sentiment@9", TEXTS), "'sentiment' has no version 9; its versions are 1, 2"),
        (("sentiment", [("good", "a film")]), "'sentiment' reads text; pass no second texts"),
        (("sentiment", {"text": TEXTS}, TEXTS), "name that of the second texts with text_pair instead of pairs"),
        ((["sentiment"], {"text": TEXTS}), "data has 11 rows, but there are 1 tasks; pass one for each"),
        (("sentiment", {"a": TEXTS, "b": TEXTS}), "data has no columns with usual names for texts"),
        (("sentiment", "none.csv"), "There is no file none.csv"),
        (("sentiment", ["good", None]), "Row 2 is not a text"),
        (("sentiment", ["\ud800"]), "Row 1 is not a text"),
    ],
)
def test_an_invalid_call_of_predict_is_refused_in_one_sentence(bank, arguments, message):
    with pytest.raises(adapterbank.AdapterbankError, match=message) as caught:
        bank.predict(*arguments)
    assert "\n" not in str(caught.value)


def test_predict_takes_every_form_of_data_that_train_takes(bank, tmp_path):
    for task, rows in (("sentiment", reviews(2)), ("score", scores(2)), ("pair", pairs(2))):
        texts = [row[:-1] if task == "pair" else row[0] for row in rows]
        columns = ("text", "text_pair", "label") if task == "pair" else ("text", "label")
        frame = pandas.DataFrame(rows, columns=columns)  # as many rows as columns, or one fewer
        file = write(tmp_path / "rows.csv", rows, columns)
        wanted = bank.predict(task, texts)
        assert wanted == bank.predict(task, frame)
        assert wanted == bank.predict(task, frame.to_dict(orient="list"))
        assert wanted == bank.predict(task, frame.to_dict(orient="records"))
        assert wanted == bank.predict(task, rows)
        assert wanted == bank.predict(task, [list(row) for row in rows])
        assert wanted == bank.predict(task, file)
        assert wanted == bank.predict(task, str(file))
        assert wanted == bank.predict(task, frame.rename(columns={"text": "a", "text_pair": "b", "label": "c"}),
                                      text="a", text_pair="b" if task == "pair" else None)  # fmt: skip
        assert wanted == bank.predict([task] * 2, frame)
    texts = [text for text, _ in reviews(2)]
    wanted = bank.predict("sentiment", texts)
    assert wanted == bank.predict("sentiment", pandas.Series(texts, index=[7, 3]))
    assert wanted == bank.predict("sentiment", np.array(texts))
    assert wanted == bank.predict("sentiment", iter(texts))
    assert bank.predict("pair", np.array([["who", "a cat"]])) == bank.predict("pair", [("who", "a cat")])
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    assert wanted == bank.predict("sentiment", tmp_path / "lines.txt")
    assert bank.predict("sentiment", pandas.Series(["good", None])) == bank.predict("sentiment", ["good", ""])
    mixed = bank.predict(["sentiment", None], pandas.DataFrame({"text": texts, "other": ["x", "y"]}))
    assert mixed[0].label == wanted[0].label
    assert mixed[1].embedding is not None


def test_a_text_of_a_frame_that_is_cut_is_named(bank):
    frame = pandas.DataFrame({"text": ["good", "the cat was good " * 30]})
    assert [one.truncated for one in bank.predict("sentiment", frame)] == [None, True]


def test_an_unknown_task_is_refused_with_the_nearest_one(bank):
    with pytest.raises(UnknownName, match=r"'sentimant' is not a task of this bank\. Did you mean 'sentiment'\?"):
        bank.predict("sentimant", TEXTS)


def test_tasks_can_be_listed_shown_evaluated_and_removed(bank):
    names = ["head", "pair", "score", "sentiment", "span", "tags", "three", "upper", "whole"]
    assert [manifest.name for manifest in bank.tasks()] == names
    assert (bank.show("sentiment").version, bank.show("sentiment@1").version) == (2, 1)
    assert bank.evaluate("sentiment@1", ROWS)["task"] == "sentiment@1"
    assert bank.evaluate("sentiment", ROWS)["accuracy"] == bank.show("sentiment").metrics["dev"]["accuracy"]
    bank.remove("sentiment@2")
    assert bank.show("sentiment").version == 1
    bank.remove("sentiment")
    assert [manifest.name for manifest in bank.tasks()] == [name for name in names if name != "sentiment"]
    assert bank.gc(dry_run=True) == []


def test_evaluate_takes_files_and_reports_dropped_rows(bank, tmp_path):
    found = bank.evaluate("sentiment", write(tmp_path / "t.jsonl", [*ROWS, ("", "positive")]))
    assert found["rows"] == 24
    assert found["notes"] == [f"{tmp_path / 't.jsonl'}: dropped 1 row of 25 with an empty text (first: row 25)."]


# --- opening ------------------------------------------------------------------------------------------------


def test_the_first_training_creates_the_bank_which_then_knows_its_encoder(tmp_path, checkpoint, bert):
    path = tmp_path / "bank"
    new = open_bank(path, str(checkpoint("bert")[0]))
    assert new.tasks() == []
    assert not path.exists()
    new.train("s", ROWS, ROWS, **FAST)
    again = open_bank(path)
    assert again.backbone.sha256 == bert.sha256
    assert again.predict("s", TEXTS) == new.predict("s", TEXTS)


def test_a_copied_bank_gives_the_same_predictions(bank, tmp_path):
    copy = open_bank(shutil.copytree(bank.path, tmp_path / "copy"))
    assert copy.predict("sentiment", TEXTS) == bank.predict("sentiment", TEXTS)
    assert all(finding.ok for finding in copy.audit())


@pytest.fixture(scope="module")
def other_encoder(tmp_path_factory):
    """Return an encoder of the same shape with other weights."""
    folder = tmp_path_factory.mktemp("other")
    save_random("bert", folder, seed=1)
    return folder


def test_another_encoder_is_refused_before_anything_is_trained_or_predicted(bank, other_encoder):
    before = snapshot(bank.path)
    for other in (str(other_encoder), adapterbank.load_backbone(str(other_encoder))):
        with pytest.raises(BackboneMismatch, match="use the same encoder, or another bank"):
            open_bank(bank.path, other)
    assert snapshot(bank.path) == before


def test_an_encoder_whose_files_changed_is_refused(made, other_encoder, tmp_path, checkpoint):
    encoder = shutil.copytree(checkpoint("bert")[0], tmp_path / "encoder")
    bank = open_bank(tmp_path / "bank", str(encoder))
    bank.train("s", ROWS, ROWS, **FAST)
    shutil.copy(other_encoder / "model.safetensors", encoder / "model.safetensors")
    with pytest.raises(BackboneMismatch):
        open_bank(tmp_path / "bank").predict("s", TEXTS)
    with pytest.raises(BackboneMismatch):
        open_bank(tmp_path / "bank").train("t", ROWS, ROWS, **FAST)


def test_a_flipped_byte_of_the_weights_is_detected_on_load(bank):
    file = bank.show("score") and bank.path / "tasks" / "score" / "1" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(PackageDamaged, match=r"weights\.safetensors has been changed: its sha256 differs"):
        bank.predict("score", TEXTS)
    assert bank.predict("sentiment", TEXTS)


def test_a_path_that_is_not_a_bank_is_refused(tmp_path):
    with pytest.raises(BankError, match="nowhere does not exist"):
        open_bank(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo.jpg").write_text("x")
    with pytest.raises(BankError, match="is a file"):
        open_bank(tmp_path / "file", "minilm")
    with pytest.raises(BankError, match="is not a bank"):
        open_bank(tmp_path / "folder", "minilm")


def test_a_wrong_device_or_precision_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_bank(tmp_path / "bank", "minilm", device="gpu", precision="fp16")
    assert [sentence.split(" is ")[0] for sentence in caught.value.mistakes] == ["precision", "device"]


def test_train_takes_every_option_of_the_shell_and_refuses_others(bank):
    with pytest.raises(ConfigError, match=r"'epoch' is not an option of a run\. Did you mean 'epochs'\?"):
        bank.train("s", ROWS, epoch=3)
    with pytest.raises(InputError, match=r"This bank uses .*; open another bank for 'mpnet'"):
        bank.train("s", ROWS, backbone="mpnet", **FAST)


def test_an_open_bank_predicts_with_the_default_that_another_process_trained_meanwhile(bank, tmp_path):
    before = bank.predict("sentiment", TEXTS)
    data = write(tmp_path / "train.csv", ROWS)
    words = ["train", "--bank", bank.path, "--task", "sentiment", "--train", data, "--dev", data, "--seed", 7]
    with process(*words, *flags(FAST)) as other:
        _, errors = other.communicate(timeout=900)
    assert other.returncode == 0, errors
    assert bank.show("sentiment").version == 3
    after = bank.predict("sentiment", TEXTS)
    assert after != before
    assert after == open_bank(bank.path).predict("sentiment", TEXTS)
    assert bank.predict("sentiment@2", TEXTS) == before


# --- the real encoder ---------------------------------------------------------------------------------------


@pytest.mark.minilm
def test_the_real_encoder_learns_two_tasks_and_predicts_a_mixed_batch(minilm, tmp_path):
    bank = open_bank(tmp_path / "bank", minilm, device="cpu")
    options = {"epochs": 6, "size": 16, "batch": 8}
    record = bank.train("sentiment", ROWS, ROWS, **options).record
    bank.train("score", scores(), scores(), **options)
    assert record["params"]["trained"] == 12 * (2 * 16 * 384 + 384 + 16) + 13 * 768 + 385 * 2
    assert record["metrics"]["dev"]["accuracy"] > 0.9
    good, number, bare = bank.predict(["sentiment", "score", None], [ROWS[1][0]] * 3)
    assert good.label == "positive"
    assert number.value == pytest.approx(bank.predict("score", [ROWS[1][0]])[0].value, abs=1e-5)
    assert bare.embedding.shape == (384,)
    assert [finding.how for finding in bank.audit()] == ["to the bit"] * 2


def test_a_new_bank_in_the_same_folder_is_not_predicted_with_the_old_weights(tmp_path, bert):
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    first = bank.train("s", reviews(), **FAST)
    old = bank.predict("s", ["the big cat was good"])[0].probabilities
    shutil.rmtree(tmp_path / "bank")
    second = bank.train("s", reviews(), seed=5, **FAST)
    assert first.package.ref == second.package.ref
    assert bank.predict("s", ["the big cat was good"])[0].probabilities != old


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(method={}),
        lambda m: m.update(recipe={}),
        lambda m: m["recipe"].update(max_length=10**6),
        lambda m: m["method"]["adapter"].update(activation="exec"),
        lambda m: m["method"]["adapter"].update(size=7),
        lambda m: m["method"]["head"].update(pooling="last"),
        lambda m: m["method"].update(trains=["head"]),
        lambda m: m["task"].update(kind="magic"),
        lambda m: m.update(task=[]),
    ],
)
def test_a_package_with_valid_checksums_and_invalid_contents_is_refused_in_one_sentence(tmp_path, bert, change):
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    path = bank.train("s", reviews(), **FAST).package.path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    files.write_json(path, manifest | {"checksum": files.sha256_json(manifest)})
    fresh = open_bank(tmp_path / "bank", bert, device="cpu")
    with pytest.raises(AdapterbankError, match=r"s@1|s/1"):
        fresh.predict("s", ["the cat"])
    assert [finding.ok for finding in fresh.audit()] == [False]


def test_a_weights_file_without_tensors_is_refused_in_one_sentence(tmp_path, bert):
    bank = open_bank(tmp_path / "bank", bert, device="cpu")
    path = bank.train("s", reviews(), **FAST).package.path
    (path / "weights.safetensors").write_bytes(b"not tensors")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["checksum"]
    manifest |= {"weights_sha256": files.sha256_bytes(b"not tensors"), "bytes": len(b"not tensors")}
    files.write_json(path / "manifest.json", manifest | {"checksum": files.sha256_json(manifest)})
    with pytest.raises(AdapterbankError, match="contains no tensors"):
        open_bank(tmp_path / "bank", bert, device="cpu").predict("s", ["the cat"])


def test_tasks_on_pairs_tasks_on_single_texts_and_no_task_share_a_call(bank):
    names = ["pair", "sentiment", None, "pair"]
    rows = [("what was it", "a red fox"), "the cat was good", "the cat was good", ("who", "a dog")]
    found = bank.predict(names, rows)
    for name, row, answer in zip(names, rows, found, strict=True):
        (alone,) = bank.predict(name, [row])
        np.testing.assert_allclose(numbers(answer), numbers(alone), atol=1e-5)
    seconds = ["a red fox", None, None, "a dog"]
    again = bank.predict(names, [row[0] if isinstance(row, tuple) else row for row in rows], seconds)
    assert [a.to_json() for a in again] == [f.to_json() for f in found]


@pytest.mark.parametrize(("task", "field"), [("sentiment", "label"), ("three", "label"), ("tags", "labels")])
def test_an_answer_less_certain_than_asked_for_is_none(bank, task, field):
    sure = bank.predict(task, TEXTS)
    middle = sorted(certainty(one, field) for one in sure)[len(sure) // 2]
    found = bank.predict(task, TEXTS, abstain=middle)
    assert 0 < sum(one.abstained == field for one in found) < len(found)
    for one, before in zip(found, sure, strict=True):
        given = certainty(before, field) >= middle
        assert getattr(one, field) == (getattr(before, field) if given else None)
        assert one.probabilities == before.probabilities
        assert one.to_json()[field] == (before.to_json()[field] if given else None)
        assert list(one.to_json()) == list(before.to_json())


def certainty(one, field):
    """Return the probability of a prediction's least certain part."""
    given = {one.label} if field == "label" else {*one.labels}
    parts = [p if name in given else 1 - p for name, p in one.probabilities.items()]
    return max(one.probabilities.values()) if field == "label" else min(parts)


@pytest.mark.parametrize(("task", "abstain", "message"), [
    ("score", 0.8, "'score' is regression, which has no probabilities; leave out abstain"),
    ("sentiment", 1.5, "abstain is 1.5; give a probability from 0 to 1"),
    ("sentiment", float("nan"), "abstain is nan; give a probability"),
])  # fmt: skip
def test_a_confidence_that_cannot_be_asked_for_is_refused(bank, task, abstain, message):
    with pytest.raises(InputError, match=message):
        bank.predict(task, ["why"], abstain=abstain)


def test_several_tasks_are_evaluated_in_one_call_as_each_alone(bank):
    wanted = {"sentiment": reviews(), "pair": pairs(), "sentiment@1": reviews(10)}
    together = bank.evaluate(wanted)
    assert together.keys() == wanted.keys()
    for name, data in wanted.items():
        assert together[name] == bank.evaluate(name, data)
    with pytest.raises(InputError, match="pass a name, or a mapping"):
        bank.evaluate(["sentiment"], reviews())


def test_evaluate_finds_columns_by_usual_names_or_by_given_ones(bank):
    expected = bank.evaluate("sentiment", reviews())
    usual = [{"sentence": text, "class": label} for text, label in reviews()]
    odd = [{"verdict": label, "what": text, "noise": "x"} for text, label in reviews()]
    assert bank.evaluate("sentiment", usual)["accuracy"] == expected["accuracy"]
    assert bank.evaluate("sentiment", odd, text="what", label="verdict")["accuracy"] == expected["accuracy"]
    with pytest.raises(InputError):
        bank.evaluate("sentiment", odd)


def test_splits_in_one_object_train_like_separate_ones(tmp_path, checkpoint):
    bank = open_bank(tmp_path / "bank", str(checkpoint("bert")[0]), device="cpu")
    rows = pandas.DataFrame(reviews(24), columns=["text", "label"])
    given = {"train": rows, "validation": reviews(8), "test": rows[:6].to_numpy()}
    record = bank.train("one", given, **FAST).record
    apart = bank.train("one", rows, reviews(8), reviews(6), **FAST).record
    assert record["config"]["data"] == apart["config"]["data"]
    assert {name: part["rows"] for name, part in record["config"]["data"].items()} == {"train": 24, "dev": 8, "test": 6}


def test_a_task_reads_its_joined_texts_and_separated_labels_again(tmp_path, checkpoint):
    bank = open_bank(tmp_path / "bank", str(checkpoint("bert")[0]), device="cpu")
    rows = [{"title": text[:7], "body": text[8:], "tags": "red, big" if i % 2 else "big"}
            for i, (text, _) in enumerate(reviews(24))]  # fmt: skip
    bank.train("tickets", rows, rows, text="title,body", label="tags", label_separator=",", **FAST)
    assert bank.show("tickets").task["text"] == ["title,body"]
    again = open_bank(tmp_path / "bank")
    assert again.evaluate("tickets", rows)["rows"] == 24
    file = tmp_path / "new.csv"
    pandas.DataFrame(rows).to_csv(file, index=False)
    examples = read_texts(file, Task.from_json(again.show("tickets").task))
    assert examples.texts[0] == f"{rows[0]['title']}\n{rows[0]['body']}"


def test_a_file_without_a_header_is_trained_on_and_scored(tmp_path, checkpoint):
    bank = open_bank(tmp_path / "bank", str(checkpoint("bert")[0]), device="cpu")
    file = tmp_path / "bare.csv"
    pandas.DataFrame(reviews(24)).to_csv(file, index=False, header=False, sep=";")
    bank.train("bare", file, text="1", label="2", header=False, **FAST)
    assert bank.evaluate("bare", file, header=False)["rows"] == 24
    with pytest.raises(DataError, match="--no-header"):
        bank.evaluate("bare", file)
    file.write_text(file.read_text() + "nothing;\n")
    with pytest.raises(DataError, match=r"row 25: column '2' is empty; .*--drop-unlabelled"):
        bank.evaluate("bare", file, header=False)
    assert bank.evaluate("bare", file, header=False, drop_unlabelled=True)["rows"] == 24


@pytest.mark.parametrize("task", ["sentiment", "score", "tags", "pair", "whole"])
def test_an_explanation_is_the_change_of_the_answer_without_each_word(bank, task):
    row = ("the cat was good", "a red fox") if task == "pair" else "the cat was good, why?"
    (found,) = bank.predict(task, [row], explain=True)
    (plain,) = bank.predict(task, [row])
    np.testing.assert_allclose(numbers(found), numbers(plain), atol=1e-5)
    told = found.to_json()["explanation"]
    assert plain.explanation is None
    assert len(told["words"]) == 7
    for one in told["words"]:
        texts = list(row) if task == "pair" else [row]
        at = int(one.get("in") == "pair")
        assert texts[at][one["start"] : one["end"]] == one["word"]
        texts[at] = " ".join((texts[at][: one["start"]] + texts[at][one["end"] :]).split())
        (without,) = bank.predict(task, [tuple(texts) if task == "pair" else texts[0]])
        whole, part = (
            one.value if told["of"] == "value" else one.probabilities[told["of"]] for one in (plain, without)
        )
        assert one["share"] == pytest.approx(whole - part, abs=1e-5)


@pytest.mark.parametrize("task", ["span", None])
def test_what_has_no_probability_and_no_value_cannot_be_explained(bank, task):
    with pytest.raises(InputError, match="neither probabilities nor a value"):
        bank.predict(task, [("who", "a dog")] if task else ["who"], explain=True)
