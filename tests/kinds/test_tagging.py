"""Tagging: data in every form, windows, the best possible sequence, and the same answers everywhere."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from adapterbank.api.display import manifest_facts
from adapterbank.api.opened import open_bank
from adapterbank.encoder.batch import Tokens
from adapterbank.errors import DataError
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.schemes import best_path
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.tagging import first_tokens
from adapterbank.kinds.words import Words
from adapterbank.slots.plan import Head
from adapterbank.tasks.columns import find_columns, infer_task
from adapterbank.tasks.examples import read_examples
from adapterbank.tasks.tables import Table, table_from
from small_data import FAST, NOUNS, answers, reviews, scores, shell, tags

TAGS = ("O", "B-animal", "I-animal", "B-place", "I-place")
ROWS = [
    {"tokens": ["the", word, noun, "was", "good"], "tags": ["O", "B-thing", "I-thing", "O", "O"]}
    for noun in NOUNS
    for word in ("red", "big", "lazy")
]


def read(rows, **options):
    """Return the task and the examples that rows state."""
    table = table_from(rows)
    columns = find_columns(table, options.pop("text", None), None, options.pop("label", None), options.get("kind"))
    task = infer_task(table, columns, name="t", **options)
    return task, *read_examples(table, task)


def tags_of(examples, row=0):
    return [tag for _, _, _, tag in examples.targets[row]]


# --- data -----------------------------------------------------------------------------------------------------


def test_words_and_tags_are_recognized_and_state_the_labels():
    task, examples, report = read(
        [{"tokens": ["EU", "and", "New", "York"], "ner_tags": ["B-org", "O", "B-loc", "I-loc"]}]
    )
    assert (task.kind, task.metric) == ("tagging", "tag_f1")
    assert task.labels == ("O", "B-org", "I-org", "B-loc", "I-loc")
    assert examples.targets[0] == ((0, 2, 1, "B-org"), (3, 6, 0, "O"), (7, 10, 3, "B-loc"), (11, 15, 4, "I-loc"))
    assert not report.notes


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        (["I-loc", "I-loc", "O", "I-loc", "B-loc"], "are IOB1"),
        (["B-loc", "E-loc", "O", "S-loc", "S-loc"], "are BIOES"),
        (["B-loc", "L-loc", "O", "U-loc", "U-loc"], "are BILOU"),
    ],
)
def test_other_schemes_become_iob2_and_are_told(tags, told):
    _, examples, report = read([{"tokens": list("abcde"), "tags": tags}])
    assert tags_of(examples) == ["B-loc", "I-loc", "O", "B-loc", "B-loc"]
    assert told in report.notes[0]


def test_lists_that_were_written_as_text_are_words_and_tags():
    row = {"tokens": "['EU', 'rose', '1.0']", "tags": "['B-org', 'O', 'O']"}
    task, examples, _ = read([row])
    assert (task.kind, examples.texts) == ("tagging", ["EU rose 1.0"])
    assert tags_of(examples) == ["B-org", "O", "O"]


def test_broken_sequences_are_counted_and_told():
    good = {"tokens": ["a", "b"], "tags": ["B-x", "I-x"]}
    _, examples, report = read([good, good | {"tokens": ["c", "d"]}, {"tokens": ["e", "f"], "tags": ["O", "I-x"]}])
    assert tags_of(examples, 2) == ["O", "B-x"]
    assert "1 of 3 rows have tags that IOB2 does not allow" in report.notes[0]


def test_plain_tags_stay_as_they_are():
    task, examples, _ = read([{"tokens": ["dogs", "bark"], "tags": ["NOUN", "VERB"]}])
    assert task.labels == ("NOUN", "VERB")
    assert tags_of(examples) == ["NOUN", "VERB"]


def test_numbers_need_their_names():
    rows = [{"tokens": ["dogs", "bark"], "ner_tags": [1, 0]}]
    with pytest.raises(DataError, match=r"are numbers \(0, 1\); name them in their order with --labels"):
        read(rows)
    _, examples, report = read(rows, labels=["O", "B-x", "I-x"])
    assert tags_of(examples) == ["B-x", "O"]
    assert "are read as indices" in report.notes[0]


@pytest.mark.parametrize(
    "spans",
    [
        [{"start": 6, "end": 14, "label": "loc"}],
        [[6, 14, "loc"]],
        [{"start_offset": 6, "end_offset": 14, "type": "loc"}],
    ],
)
def test_texts_with_spans_of_characters(spans):
    task, examples, report = read([{"text": "I saw New York.", "label": spans}, {"text": "no place", "label": []}])
    assert task.labels == ("O", "B-loc", "I-loc")
    assert tags_of(examples) == ["O", "O", "B-loc", "I-loc", "O"]
    assert tags_of(examples, 1) == ["O", "O"]
    assert not report.notes


def test_spans_that_do_not_fit_words_are_moved_or_left_out_and_told():
    spans = [[2, 4, "loc"], [0, 6, "loc"], [6, 7, "loc"]]
    _, examples, report = read([{"text": "Berlin is big", "spans": spans}])
    assert tags_of(examples) == ["B-loc", "O", "O"]
    assert report.notes == ["data: entities that overlap another or contain no word, and are left out: 2."]
    _, _, report = read([{"text": "Berlin is big", "spans": [[2, 4, "loc"]]}])
    assert report.notes == ["data: entities whose borders are moved to those of their words: 1."]


@pytest.mark.parametrize("labels", [None, ["O", "B-x", "I-x"]])
@pytest.mark.parametrize("span", [[5, 2, "x"], ["1", "2", ""], [-1, 2, "x"], {"start": 0, "end": 2}, [0, 1], 7, None])
def test_a_span_that_is_none_is_refused_with_its_row(span, labels):
    with pytest.raises(DataError, match=r"row 2: .* is not a start, a later end and a label in column 'spans'; corr"):
        read([{"text": "a b", "spans": [[0, 1, "x"]]}, {"text": "a b", "spans": [span]}], labels=labels)


def test_a_span_that_ends_after_the_text_is_refused():
    with pytest.raises(
        DataError, match=r"\[2, 4, 'x'\] ends after the text, which has 3 characters, in column 'spans'"
    ):
        read([{"text": "a b", "spans": [[2, 4, "x"]]}])


def test_another_number_of_tags_than_words_is_refused():
    with pytest.raises(DataError, match="row 1: 'tokens' has 2 words, and 'tags' has 1 tag; give a tag for each word"):
        read([{"tokens": ["a", "b"], "tags": ["X"]}, {"tokens": ["a"], "tags": ["Y"]}])


def test_a_word_without_a_tag_is_refused():
    with pytest.raises(DataError, match="row 2: word 2 has no tag in 'tags'; write one, such as O"):
        read([{"tokens": ["a"], "tags": ["B-x"]}, {"tokens": ["a", "b"], "tags": ["O", None]}])


def test_tags_that_are_numbers_and_names_at_once_are_names():
    _, examples, report = read([{"tokens": ["a", "b"], "tags": ["1", "2"]}], labels=["1", "2"])
    assert tags_of(examples) == ["1", "2"]
    assert not report.notes


def test_a_tag_that_training_did_not_have_is_refused():
    task, _, _ = read([{"tokens": ["a", "b"], "tags": ["X", "Y"]}])
    with pytest.raises(DataError, match="the tag 'Z' is not one of the task's"):
        read_examples(Table({"tokens": [["a"]], "tags": [["Z"]]}), task)


# --- words, windows and sequences -----------------------------------------------------------------------------


def window(*offsets):
    places = np.array([(-1, -1), *offsets, (-1, -1)])
    return Tokens(np.arange(len(places)), np.zeros(len(places), np.int64), places)


def test_a_word_is_where_its_first_token_is_and_a_dropped_word_is_nowhere():
    row = window((0, 3), (3, 5), (8, 9))
    assert first_tokens(row, [(0, 5), (6, 7), (8, 9), (10, 10)], first=True).tolist() == [1, -1, 3, -1]


def test_a_word_that_began_in_an_earlier_window_is_not_in_this_one():
    row = window((3, 5), (6, 8))
    assert first_tokens(row, [(0, 5), (6, 8)], first=False).tolist() == [-1, 2]


def test_the_loss_is_the_mean_over_words_whatever_the_width():
    kind, head = KINDS["tagging"], Head("tagging", 3)
    targets = kind.targets([np.array([-100, 1, -100, 2]), np.array([-100, 0])], head)
    for width in (3, 4, 7):
        x = torch.randn(2, width, 3, generator=torch.Generator().manual_seed(width))
        found = kind.loss(x, targets, head, torch.tensor([4.0, 2.0]))
        first = [-x[0].log_softmax(-1)[place, tag] for place, tag in ((1, 1), (3, 2)) if place < width]
        assert found.tolist() == pytest.approx([float(sum(first) / len(first)), float(-x[1].log_softmax(-1)[1, 0])])


def test_the_best_sequence_is_that_of_a_search_over_all_possible_ones():
    draw = np.random.default_rng(0)
    for _ in range(60):
        scores = draw.normal(size=(draw.integers(1, 5), len(TAGS)))
        best = max(
            (path for path in itertools.product(range(len(TAGS)), repeat=len(scores)) if possible(path)),
            key=lambda path: sum(scores[word, tag] for word, tag in enumerate(path)),
        )
        assert best_path(scores, TAGS).tolist() == list(best)


def possible(path):
    """Return whether every entity of a sequence begins."""
    names = ["O", *(TAGS[tag] for tag in path)]
    return all(not tag.startswith("I") or old in (f"B{tag[1:]}", tag) for old, tag in itertools.pairwise(names))


def test_each_word_is_read_in_the_window_where_it_has_most_context():
    from adapterbank.inference.rows import Rows

    task, examples, _ = read([{"tokens": ["a", "b", "c"], "tags": ["X", "Y", "X"]}])
    rows = Rows([window((0, 1), (2, 3)), window((2, 3), (4, 5))], None, owners=[0, 0])
    sure = np.zeros((4, 2))
    left, right = sure.copy(), sure.copy()
    left[1, 0] = left[2, 1] = 9.0  # a is X, and b is Y with a token on each side
    right[1, 0] = right[2, 1] = 9.0  # b would be X at the border of the second window
    assert KINDS["tagging"].decide(HeadOutputs(task, examples, rows, [left, right])) == [("X", "Y", "Y")]


# --- a task through the library -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bank(tmp_path_factory, bert):
    """Train a task of entities and one of plain tags."""
    made = open_bank(tmp_path_factory.mktemp("tagging") / "bank", bert, device="cpu")
    made.train("things", ROWS, ROWS, **{**FAST, "epochs": 12})
    plain = [{"tokens": row["tokens"], "tags": ["X" if tag == "O" else "Y" for tag in row["tags"]]} for row in ROWS]
    made.train("kinds", plain, plain, **{**FAST, "epochs": 12})
    return made


def test_it_learns_and_is_scored_with_intervals(bank):
    report = bank.evaluate("things", ROWS)
    for name in ("tag_f1", "tag_accuracy"):
        low, high = report["intervals"][name]
        assert low <= report[name] <= high
    assert report["tag_f1"] > 0.9
    assert report["types"]["thing"]["support"] == len(ROWS)
    assert bank.evaluate("kinds", ROWS and [{**row, "tags": ["X", "Y", "Y", "X", "X"]} for row in ROWS])["tag_f1"] > 0.9


def test_entities_have_text_label_offsets_and_probability(bank):
    (one,) = bank.predict("things", ["the red fox was good"])
    (found,) = one.entities
    assert (found["text"], found["label"], found["start"], found["end"]) == ("red fox", "thing", 4, 11)
    assert 0.5 < found["probability"] <= 1
    assert json.loads(json.dumps(one.to_json())) == {"entities": [found]}


def test_words_and_the_same_text_have_the_same_answer(bank):
    words = ["the", "red", "fox", "was", "good"]
    text, listed, row = (bank.predict("things", rows)[0] for rows in ([" ".join(words)], [words], [{"tokens": words}]))
    assert text.entities == listed.entities == row.entities
    assert listed.tags == row.tags == ["O", "B-thing", "I-thing", "O", "O"]


def test_plain_tags_have_an_answer_for_each_word(bank):
    (one,) = bank.predict("kinds", ["the red fox"])
    assert [(word["text"], word["label"]) for word in one.words] == [("the", "X"), ("red", "Y"), ("fox", "Y")]


def test_a_text_of_many_windows_is_tagged_to_its_end(bank):
    words = ["the", "red", "fox", "was", "good"] * 60  # the encoder has 64 positions
    (one,) = bank.predict("things", [words])
    assert len(one.tags) == len(words)
    assert any(entity["end"] > len(" ".join(words)) - 20 for entity in one.entities)
    assert one.truncated is None


def test_a_word_without_tokens_keeps_its_place(bank):
    (one,) = bank.predict("things", [["the", "\u200b", "red", "fox", "was", ""]])
    assert len(one.tags) == 6
    assert bank.predict("things", [""])[0].entities == []


def test_rows_share_a_batch_with_other_tasks(bank):
    texts = ["the red fox was good", "the big dog was good"]
    alone = bank.predict("things", texts[:1]) + bank.predict("kinds", texts[1:])
    together = bank.predict(["things", "kinds"], texts)
    for one, two in zip(
        [*together[0].entities, *together[1].words], [*alone[0].entities, *alone[1].words], strict=True
    ):
        assert one == {**two, "probability": pytest.approx(two["probability"], abs=1e-4)}


def test_rows_share_a_batch_with_every_other_kind(bank):
    bank.train("sentiment", reviews(), reviews(), **FAST)
    bank.train("score", scores(), scores(), kind="regression", **FAST)
    bank.train("colours", tags(), tags(), kind="multilabel", **FAST)
    bank.train("what", answers(), answers(), **FAST)
    tasks = ["sentiment", "things", "what", "score", "kinds", "colours", "things"]
    texts = ["the red fox was good"] * 7
    texts[-1] = ["the", "big", "dog", "ran"] * 30  # several windows
    seconds = [None, None, texts[0], None, None, None, None]
    together = bank.predict(tasks, texts, seconds)
    for name, text, pair, found in zip(tasks, texts, seconds, together, strict=True):
        (alone,) = bank.predict(name, [text], None if pair is None else [pair])
        assert rounded(found.to_json()) == rounded(alone.to_json())


def rounded(value):
    """Return JSON whose numbers have three digits."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def test_windows_of_any_length_give_each_word_one_tag(bank):
    """The tiny encoder has 64 positions: texts around one, two and three windows, given as words and as text."""
    for count in (1, 30, 31, 61, 62, 63, 64, 93, 94, 125):
        words = (["the", "red", "fox", "was", "good"] * 30)[:count]
        (listed,) = bank.predict("kinds", [words])
        (plain,) = bank.predict("kinds", [" ".join(words)])
        assert [one["text"] for one in listed.words] == words
        assert plain.words == listed.words
        right = sum(one["label"] == ("Y" if one["text"] in ("red", "fox") else "X") for one in listed.words)
        assert right > 0.8 * count


def test_targets_of_windows_cover_every_word_and_agree(bert):
    from adapterbank.inference.rows import make_rows

    _, examples, _ = read([{"tokens": ["the", "foxes", "ran"] * 50, "tags": ["X", "Y", "X"] * 50}])
    rows = make_rows(bert, examples, kind="tagging", max_length=24)
    assert len(rows) > 3
    seen: dict[int, set[int]] = {}
    for row, target in zip(rows.tokens, rows.targets, strict=True):
        for place in np.flatnonzero(target >= 0):
            seen.setdefault(int(row.offsets[place, 0]), set()).add(int(target[place]))
    assert seen == {start: {index} for start, _, index, _ in examples.targets[0]}


def test_files_in_and_out(bank, tmp_path):
    (tmp_path / "in.conll").write_text("the\tO\nred\tO\nfox\tO\n\nthe\tO\nbig\tO\ndog\tO\n")
    report = bank.predict_file("things", tmp_path / "in.conll", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (report.rows, report.failed) == (2, 0)
    assert [row["entities"][0]["text"] for row in rows] == ["red fox", "big dog"]
    bank.predict_file("things", tmp_path / "in.conll", tmp_path / "out.csv")
    assert '""label"": ""thing""' in (tmp_path / "out.csv").read_text()


def test_it_is_audited_ablated_and_shown(bank):
    assert all(one.ok for one in bank.audit())
    assert bank.ablate("things", ROWS)["metric"] == "tag_f1"
    facts = manifest_facts(bank.show("things"))
    assert facts["task"] == "things@1, tagging, reads tokens"
    assert facts["labels"] == "O, B-thing, I-thing"
    assert [part.split()[0] for part in facts["dev scores"].split(", ")] == [
        *("tag_f1", "tag_accuracy", "precision", "recall"),
    ]


def test_it_is_pruned(bank):
    found, result = bank.prune("things", ROWS, tolerance=100)
    assert (found["metric"], found["removed"]) == ("tag_f1", [0, 1, 2])
    assert result.record["package"] == "things@2"
    bank.rollback("things")
    assert all(one.ok for one in bank.audit())


def test_it_is_swept(bert, tmp_path):
    lines = ["\n".join(f"{w} {t}" for w, t in zip(row["tokens"], row["tags"], strict=True)) for row in ROWS]
    (tmp_path / "rows.conll").write_text("\n\n".join(lines))
    file = str(tmp_path / "rows.conll")
    study = {"task": "things", "train": file, "dev": file, **FAST, "size": [2, 4], "select": {"per": ["task"]}}
    outcome = open_bank(tmp_path / "bank", bert, device="cpu").sweep(study, keep="best")
    assert (outcome.progress.done, outcome.progress.failed) == (2, 0)
    assert open_bank(tmp_path / "bank", bert, device="cpu").predict("things", ["the red fox"])[0].entities is not None


def test_the_shell_trains_scores_and_predicts(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["\n".join(f"{w} {t}" for w, t in zip(row["tokens"], row["tags"], strict=True)) for row in ROWS]
    (tmp_path / "rows.conll").write_text("\n\n".join(lines) + "\n")
    encoder = checkpoint("bert")[0]
    shown = shell("data", "--train", "rows.conll", "--backbone", encoder)
    assert "tagging" in shown.out
    assert "thing" in shown.out
    common = ["--bank", "bank", "--backbone", encoder, "--task", "things"]
    options = ["--epochs", "2", "--size", "4", "--max-length", "32"]
    done = shell("train", *common, "--train", "rows.conll", "--dev", "rows.conll", *options)
    assert done.code == 0, done.err
    scored = shell("evaluate", *common, "--data", "rows.conll")
    assert "entities" in scored.out
    said = shell("predict", *common, "--text", "the red fox was good")
    assert said.answers[0].keys() == {"entities"}


def test_it_is_served_with_texts_and_with_words(bank, bert):
    pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")
    import time

    from starlette.testclient import TestClient

    from adapterbank.inference.engine import Engine
    from adapterbank.serving.http.app import create_app
    from adapterbank.serving.service.service import BankService
    from adapterbank.storage.bank import Bank

    words = ["the", "red", "fox", "was", "good"]
    with TestClient(create_app(BankService(Bank.open(bank.path), Engine(bert, device="cpu")))) as client:
        for _ in range(6000):
            if client.get("/readyz").status_code == 200:
                break
            time.sleep(0.01)
        body = {"texts": [" ".join(words), words]}
        plain, listed = client.post("/v1/tasks/things/predict", json=body).json()["predictions"]
        assert plain["entities"] == listed["entities"]
        assert plain["entities"][0]["text"] == "red fox"
        assert listed["tags"] == ["O", "B-thing", "I-thing", "O", "O"]
        rows = [{"task": "things", "text": words}, {"task": "kinds", "text": " ".join(words)}]
        both = client.post("/v1/predict", json={"rows": rows}).json()["predictions"]
        assert [list(one)[2] for one in both] == ["entities", "words"]
        assert client.post("/v1/tasks/things/predict", json={"texts": [["a", 1]]}).status_code == 422


def test_a_text_given_as_words_is_a_text_to_other_kinds(bank):
    assert isinstance(Words.of(["a", "b"]), str)
    embedded = bank.predict(None, ["red"]) + bank.predict(None, [["red"]])
    assert np.array_equal(embedded[0].embedding, embedded[1].embedding)
