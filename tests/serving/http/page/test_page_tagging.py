"""Promise: the page marks entities and tags in a real browser, readable in light and dark, and reads files of CoNLL."""

from __future__ import annotations

import re

import pytest

from serving.http.page.browsing import BROWSER, DRAWN, contrast, expect, posted, upload
from serving.sample_server import MARKUP, SampleService, task

pytestmark = BROWSER
TYPES = ("person", "location", "group", "creative-work", "a-very-long-label-" + "of-many-parts-" * 8, MARKUP)
FACE = "\N{GRINNING FACE}"
COLOURS = """(mark) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  return [getComputedStyle(mark.querySelector("small")).color, getComputedStyle(mark).backgroundColor].map((colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  });
}"""
TEXT = """(shown) => {
  const copy = shown.cloneNode(true);
  copy.querySelectorAll("small").forEach((one) => one.remove());
  return copy.textContent;
}"""


@pytest.fixture
def service():
    labels = ["O", *(f"{mark}-{name}" for name in TYPES for mark in "BI")]
    return SampleService(
        [task("people", "tagging", labels=labels), task("words", "tagging", labels=["NOUN", "VERB", "O"]), task("film")]
    )


def tried(page, url, name, text):
    """Try a text on a task and return what is marked."""
    page.goto(f"{url}/#try/{name}")
    expect(page.locator("#try-task")).to_have_value(name)
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#try-result .tagged")).to_be_visible()
    return page.locator(".tagged mark")


def test_entities_are_marked_at_their_characters_with_label_and_confidence(page, url, faults):
    text = f"{FACE} i saw Ann\nin Rome{FACE} with e\u0301 Sting"
    marks = tried(page, url, "people", text)
    expect(marks.locator("> span")).to_have_text(["Ann", "Rome", "Sting"])
    expect(marks.locator("small")).to_have_text(["person90.0\u00a0%", "location88.0\u00a0%", "group86.0\u00a0%"])
    assert len({mark.evaluate("(mark) => getComputedStyle(mark).backgroundColor") for mark in marks.all()}) == 3
    expect(page.locator(".prediction")).to_have_text("Ann (person), Rome (location), Sting (group)")
    assert page.locator(".tagged").evaluate(TEXT) == text
    page.get_by_text("As a table").click()
    expect(page.locator("#try-result tbody tr").nth(1)).to_have_text("Romelocation88.0\u00a0%15–19")
    assert posted(faults) == [{"text": text}]


def test_a_long_text_has_a_short_headline_and_long_labels_stay_within_the_screen(page, url):
    marks = tried(page, url, "people", "Ann and Bob " * 40)
    expect(marks).to_have_count(80)
    expect(page.locator(".prediction")).to_contain_text("and 74 more")
    expect(marks.nth(5).locator("small")).to_contain_text(MARKUP)
    assert page.locator("#try-result img").count() == 0


def test_every_word_has_its_tag_and_a_text_without_entities_says_so(page, url):
    marks = tried(page, url, "words", "dogs bark now")
    expect(marks.locator("small")).to_have_text(["NOUN", "VERB", "O"])
    expect(marks.nth(1)).to_have_attribute("title", "VERB 88.0\u00a0%")
    page.locator("#try-task").select_option("people")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".prediction")).to_have_text("no entity")


def test_shares_of_words_are_offered_only_where_there_are_some(page, url, faults):
    page.goto(f"{url}/#try/film")
    expect(page.locator("#try-task")).to_have_value("film")
    page.get_by_label("Show each word's share").check()
    tried(page, url, "people", "Ann")
    expect(page.get_by_label("Show each word's share")).to_be_hidden()
    assert posted(faults) == [{"text": "Ann"}]


def test_all_tasks_together_list_the_entities(page, url):
    page.goto(f"{url}/#try")
    page.get_by_label("Text", exact=True).fill("Ann ran")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".answer", has_text="people")).to_contain_text("Ann (person)")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_are_readable_in_light_and_dark(page, url, theme):
    page.emulate_media(color_scheme=theme)
    page.evaluate(DRAWN)
    marks = tried(page, url, "people", "Ann Bob Cat Dan Eve Fay")
    for mark in marks.all():
        ink, ground = (colour[:3] for colour in mark.evaluate(COLOURS))
        assert contrast(ink, ground) >= 4.5


@pytest.mark.parametrize(
    ("name", "content", "header", "row", "label"),
    [
        ("train.conll", "Ann\tB-per\nran\tO\n\t\nBob\tB-per\n", "tokenstags", "Ann ranB-per O", "tags"),
        ("train.txt", "-DOCSTART- -X- O\n\nAnn NNP B-per\n\n", "tokenscolumn_2tags", "AnnNNPB-per", "tags"),
        (
            "dev.conllu",
            "# text = Ann\n1-2\tx" + "\t_" * 8 + "\n1\tAnn\tann\tPROPN\tNNP\t_\t0\troot\t_\t_\n",
            "tokenslemmasuposxposfeatsdeprels",
            "AnnannPROPNNNP_root",
            "upos",
        ),
    ],
)
def test_files_of_sentences_have_columns_to_choose_and_are_sent(
    page, faults, jobs, tmp_path, name, content, header, row, label
):
    (tmp_path / name).write_text(content, encoding="utf-8")
    upload(page, tmp_path / name)
    endings = page.locator("#train-file").get_attribute("accept").split(",")
    assert {".conll", ".conllu", ".iob", ".bio"} <= set(endings)
    expect(page.locator("#train-preview thead")).to_have_text(header)
    expect(page.locator("#train-preview tbody tr").first).to_have_text(row)
    expect(page.get_by_label("Text column")).to_have_value("tokens")
    expect(page.get_by_label("Label column")).to_have_value(label)
    expect(page.get_by_label("Task name")).to_have_value(re.sub(r"\..*", "", name))
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#run-title .badge")).to_have_text("done")
    assert jobs.list()[0].options == {"text": "tokens", "label": label}
    assert jobs.list()[0].data["format"] == name.rpartition(".")[2]
    assert [body for method, path, body in faults.requests if "/train" in path] == [content.encode()]
