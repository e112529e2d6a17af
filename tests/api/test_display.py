"""Tests of `adapterbank.api.display`: what is shown is right, in text and in HTML, and runs nothing of others."""

from __future__ import annotations

import pickle
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from adapterbank.api import display
from adapterbank.api.opened import open_bank
from adapterbank.inference.predictions import Prediction
from adapterbank.kinds.kind import ReportTable
from small_data import FAST, reviews, scores, shell, write

MARKUP = "<script>alert('x')</script>"
ESCAPE = "\x1b[31mred"


class Page(HTMLParser):
    """Checks that every element is closed, and collects names and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], set(), ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f"{data} "


@pytest.fixture(scope="module")
def bank(tmp_path_factory, checkpoint):
    opened = open_bank(tmp_path_factory.mktemp("display") / "bank", str(checkpoint("bert")[0]), device="cpu")
    rows = [(text, MARKUP if label == "positive" else ESCAPE) for text, label in reviews()]
    opened.result = opened.train("s", rows, **FAST)
    opened.rows = rows
    opened.train("number", scores(), **FAST)
    return opened


def shown(value):
    """Return the text of both displays, after checking the HTML."""
    page, text = Page(value._repr_html_()), repr(value)
    assert page.tags <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert "\x1b" not in text + page.text
    assert [word for word in text.split() if word not in page.text] == []
    return text


def test_a_result_shows_its_scores_its_size_and_its_notes(bank):
    text = shown(bank.result)
    record = bank.result.record
    for words in ("s@1", "accuracy", f"{record['metrics']['dev']['accuracy']:.4f}", "majority", "trained parameters"):
        assert words in text
    assert all(note.replace("\x1b", "\\x1b")[:100] in text for note in record["notes"])
    assert "No dev data given" in text


def test_a_list_of_tasks_shows_what_the_shell_lists(bank):
    text = shown(bank.tasks())
    listed = shell("tasks", "--bank", bank.path).out
    assert text.split() == listed.split()
    assert isinstance(bank.tasks(), list)
    assert bank.tasks() == [bank.show("number"), bank.show("s")]


def test_a_task_shows_what_the_shell_shows(bank):
    listed = shell("show", "--bank", bank.path, "--task", "s").out
    for line in shown(bank.show("s")).splitlines():
        assert " ".join(line.split()) in " ".join(listed.split())
    assert bank.show("s") == bank.bank.get("s").manifest
    assert bank.bank.get("s").manifest == bank.show("s")
    assert bank.show("s") != bank.show("number")


def test_a_bank_shows_its_tasks_and_loads_no_encoder(bank, tmp_path):
    opened = open_bank(bank.path)
    assert "number" in shown(opened)
    assert opened._backbone is None
    assert "does not exist yet" in shown(open_bank(tmp_path / "new", "minilm"))


def test_a_bank_with_a_damaged_task_shows_the_others_and_says_why(bank, tmp_path, bert):
    opened = open_bank(tmp_path / "bank", bert, device="cpu")
    opened.train("a", reviews(), **FAST)
    opened.train("b", reviews(), **FAST)
    (tmp_path / "bank" / "tasks" / "a" / "1" / "manifest.json").write_text("{}")
    text = shown(opened)
    assert "manifest.json" in text
    assert "\n  b " in text
    (tmp_path / "bank" / "bank.json").write_text("{")
    assert "bank.json is damaged" in shown(opened)


def test_an_evaluation_shows_scores_and_the_confusion_matrix_and_is_a_dict(bank):
    found = bank.evaluate("s", bank.rows)
    text = shown(found)
    low, high = found["intervals"]["accuracy"]
    assert re.search(rf"accuracy +{found['accuracy']:.4f} +95 %: {low:.4f} to {high:.4f}", text)
    assert "confusion matrix" in text
    assert found == dict(found)
    assert pickle.loads(pickle.dumps(found)) == found
    assert repr(pickle.loads(pickle.dumps(found))) == text
    both = bank.evaluate({"s": bank.rows, "number": scores()})
    assert "s@1 on 24 rows" in shown(both)
    assert "number@1 on 24 rows" in shown(both)


def test_a_sweep_shows_its_counts_its_best_and_its_notes(bank, tmp_path):
    rows = str(write(tmp_path / "rows.csv", reviews()))
    study = {"task": "a", "train": rows, **FAST, "size": [2, 4], "select": {"per": ["task"]}}
    text = shown(bank.sweep(study, records=tmp_path / "records"))
    for words in ("2 runs: 0 had records, 2 done, 0 failed, 0 left", "best on dev", "selected", "No dev data given"):
        assert words in text
    failing = bank.sweep({**study, "layers": "9"}, records=tmp_path / "records")
    assert "failed" in shown(failing)


def test_a_prediction_shows_what_is_set_and_the_start_of_an_embedding(bank):
    (found,) = bank.predict(None, ["the cat"])
    assert repr(found).startswith("Prediction(embedding=<32 numbers: ")
    assert f"{found.embedding[0]:.4f}" in repr(found)
    assert repr(Prediction(value=0.5)) == "Prediction(value=0.5)"
    assert repr(Prediction(embedding=np.zeros(384))) == "Prediction(embedding=<384 numbers: 0.0000, 0.0000, 0.0000, …>)"


def test_a_long_table_is_cut_in_html_and_says_so():
    table = ReportTable("many", ["a"], [[str(i)] for i in range(150)])
    page = Page(display.to_html([table]))
    assert "50 more rows" in page.text
    assert len(display.to_text([table]).splitlines()) == 152
