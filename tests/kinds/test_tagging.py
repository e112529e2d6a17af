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
from adapterbank.kinds.kind import HeadOutputs
from adapterbank.kinds.schemes import best_path
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.tagging import first_tokens
from adapterbank.kinds.words import Words, joined
from adapterbank.slots.plan import Head
from adapterbank.tasks.tables import read_table
from kinds.tasks_of import read_rows as read
from small_data import FAST, NOUNS, answers, reviews, scores, shell, tags

TAGS = ("O", "B-animal", "I-animal", "B-place", "I-place")
ROWS = [
    {"tokens": ["the", word, noun, "was", "good"], "tags": ["O", "B-thing", "I-thing", "O", "O"]}
    for noun in NOUNS
    for word in ("red", "big", "lazy")
]


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
    """The file's own tags stay, and lists of words are lists in every format that comes back."""
    (tmp_path / "in.conll").write_text("the\tO\nred\tO\n|\tO\n\nthe\tO\nbig\tO\ndog\tB-animal\n")
    notes = []
    report = bank.predict_file("things", tmp_path / "in.conll", tmp_path / "out.jsonl", note=notes.append)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (report.rows, report.failed) == (2, 0)
    assert [note for note in notes if "those are things.entities and so on" in note]
    assert [row["tags"] for row in rows] == [["O", "O", "O"], ["O", "O", "B-animal"]]
    assert rows[1]["things.tags"] == ["O", "B-thing", "I-thing"]
    assert rows[1]["things.entities"][0]["text"] == "big dog"
    for name in ("out.csv", "out.parquet"):
        bank.predict_file("things", tmp_path / "in.conll", tmp_path / name)
        table = read_table(tmp_path / name)
        for column, values in {"tokens": ["the", "red", "|"], "things.tags": rows[0]["things.tags"]}.items():
            assert joined(table.columns[column][0]) == " ".join(values)
        _, examples, _ = read([{key: table.columns[key][row] for key in ("tokens", "tags")} for row in (0, 1)])
        assert examples.texts == ["the red |", "the big dog"]


def test_a_file_of_texts_has_no_column_of_tags(bank, tmp_path):
    (tmp_path / "in.csv").write_text("text\nthe red fox\n[the red fox]\n")
    bank.predict_file("things", tmp_path / "in.csv", tmp_path / "out.csv", text="text")
    table = read_table(tmp_path / "out.csv")
    assert list(table.columns) == ["text", "entities", "truncated", "error"]
    answers = [json.loads(cell)[0] for cell in table.columns["entities"]]
    texts = table.columns["text"]
    assert [text[one["start"] : one["end"]] for text, one in zip(texts, answers, strict=True)] == [
        one["text"] for one in answers
    ]


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
        for texts in ([["a", 1]], [["a", ["b"]]], [3]):
            refused = client.post("/v1/tasks/things/predict", json={"texts": texts}).json()["error"]["message"]
            assert refused == "texts.0: Input should be a valid string, or for tagging the list of a text's words."
        (bracketed,) = client.post("/v1/tasks/things/predict", json={"texts": ["['the', 'fox']"]}).json()["predictions"]
        assert "tags" not in bracketed


def test_a_text_given_as_words_is_a_text_to_other_kinds(bank):
    assert isinstance(Words.of(["a", "b"]), str)
    embedded = bank.predict(None, ["red"]) + bank.predict(None, [["red"]])
    assert np.array_equal(embedded[0].embedding, embedded[1].embedding)
