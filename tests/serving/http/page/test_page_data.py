"""Promise: the page shows a data file as the server reads it, and sends what the reader states about it."""

from __future__ import annotations

import gzip

import pytest

from serving.http.page.browsing import BROWSER, expect, upload

pytestmark = BROWSER

ROWS = "text;label\ncafé, noir;pos\nthé;neg\n"


def sent(page, jobs):
    """Train; the options and the format that the server was sent."""
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#run-title .badge")).to_have_text("done")
    run = jobs.list()[0]
    return run.options, run.data["format"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("semicolon.csv", ROWS.encode()),
        ("mark.csv", ROWS.encode("utf-8-sig")),
        ("western.csv", ROWS.replace("\n", "\r\n").encode("cp1252")),
        ("utf16.csv", ROWS.encode("utf-16")),
        ("utf16-without-a-mark.csv", ROWS.encode("utf-16-le")),
        ("excel.csv", ("sep=;\n" + ROWS).encode()),
        ("tab.csv", ROWS.replace(";", "\t").encode()),
        ("bar.tsv", ROWS.replace(";", "|").encode()),
        (
            "empty-columns.csv",
            ROWS.replace("label", "label;;").replace("pos", "pos;;").replace("neg", "neg;;").encode(),
        ),
        ("packed.csv.gz", gzip.compress(ROWS.encode(), mtime=0)),
    ],
)
def test_separator_encoding_and_compression_are_found(page, jobs, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    upload(page, tmp_path / name)
    expect(page.locator("#train-preview thead")).to_have_text("textlabel")
    expect(page.locator("#train-preview tbody td").first).to_have_text("café, noir")
    options, format = sent(page, jobs)
    assert options == {"text": "text", "label": "label"}
    assert format == name.removesuffix(".gz")[-3:]


def test_a_packed_file_is_sent_unpacked(page, faults, jobs, tmp_path):
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(ROWS.encode()))
    upload(page, tmp_path / "packed.csv.gz")
    sent(page, jobs)
    assert [body for method, _, body in faults.requests if method == "POST"] == [ROWS.encode()]


def test_a_damaged_packed_file_is_refused_in_a_sentence(page, url, tmp_path):
    (tmp_path / "packed.csv.gz").write_bytes(b"not packed")
    page.get_by_role("link", name="Train", exact=True).click()
    page.locator("#train-file").set_input_files(str(tmp_path / "packed.csv.gz"))
    expect(page.locator("#trouble")).to_contain_text("packed.csv.gz cannot be decompressed")


def test_what_is_stated_about_a_file_is_sent_and_shown(page, jobs, tmp_path):
    (tmp_path / "rows.csv").write_text("a:b;c\nd:e;f\n")
    upload(page, tmp_path / "rows.csv")
    page.get_by_text("How the file is read").click()
    page.get_by_label("Between the fields").select_option("colon")
    page.get_by_label("The first line").select_option("is a row")
    expect(page.locator("#train-preview thead")).to_have_text("12")
    expect(page.locator("#train-preview tbody tr").first).to_have_text("ab;c")
    page.get_by_label("Between the labels of a cell").fill(";")
    page.get_by_label("Rows without a label").select_option("are left out")
    stated = {"separator": ":", "header": False, "label_separator": ";", "drop_unlabelled": True}
    assert sent(page, jobs)[0] == {"text": "1", "label": "2", **stated}


def test_several_columns_replace_the_chosen_ones(page, jobs, tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer,body,urgent,bug\na,b,c,1,0\n")
    upload(page, tmp_path / "rows.csv")
    page.get_by_text("How the file is read").click()
    page.get_by_label("Several texts, joined").fill("question,body")
    page.get_by_label("A column for each label").fill("urgent,bug")
    assert sent(page, jobs)[0] == {"text": "question,body", "label": "urgent,bug"}
