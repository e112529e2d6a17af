"""Claims about figures and the report: every figure has its CSV, and the page is complete and self-contained."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made import ablation, measured, record, write

from adapterbank import config as configs
from adapterbank.analysis import figures, report, series, tables
from adapterbank.analysis.run_table import load
from adapterbank.install import extra_command
from adapterbank.studies.selection import RULES
from small_data import shell

RICH = [
    *(record(task, "full", 0.8 - 100 * lr, lr=lr) for task in ("glue-cola", "glue-mnli") for lr in (5e-5, 1e-3)),
    *(record(task, size=size, dev=0.7 + size / 1e4) for task in ("glue-cola", "glue-mnli") for size in (1, 8, 64)),
    *(record(top=top, method="top", dev=0.6) for top in (1, 2)),
    *(record(sigma=sigma, dev=0.6) for sigma in (1e-7, 1.0)),
    *(record(lr=lr, dev=0.6) for lr in (1e-4, 3e-4)),
    *(record("squad-v1", size=size, kind="span", metric="span_f1") for size in (1, 8, 64)),
    record("paper-airline", "full", 0.8, 0.8),
    record("paper-airline", dev=0.8, test=0.79, calibration={"dev": measured(7), "test": measured(8)}),
    record(method="automl", dev=0.3),
    record(average=True, dev=0.75),
]
NAMES = {"curves", "losses", "fig1", "fig3", "fig4", "fig5", "fig6-ablation", "fig6-sigma", "fig7", "reliability"}
NAMES |= {"coverage", "totals", "ways"}


def test_a_line_joins_points_over_the_same_tasks_only(tmp_path):
    tasks = ("glue-cola", "glue-rte")
    made = [record(task, "full", 0.8) for task in tasks] + [record(task, size=8) for task in tasks]
    made += [record(task, size=size) for task in tasks[:1] for size in (16, 64)]
    (figure,) = [one.figure for one in figures.draw_all(load([write(tmp_path, *made)])) if one.name == "fig1"]
    drawn = [line for line in figure.axes[0].get_lines() if line.get_label() == "adapters"]
    found = {tuple(line.get_xdata()): line.get_markerfacecolor() == "white" for line in drawn}
    assert found == {(8_000.0,): False, (16_000.0, 64_000.0): True}  # hollow: over one of the two tasks


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "records", *RICH, ablations=(ablation(layers=12), ablation("glue-mnli@1", 3)))


def test_the_python_example_of_the_documentation_works(tmp_path, monkeypatch):
    write(tmp_path / "bank" / "records", *RICH)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "draw_figures" in code)
    found = {}
    exec(code, found)
    assert {drawing.name for drawing in found["drawings"]} == NAMES
    assert found["page"].startswith("<!doctype html>")


class Page(HTMLParser):
    """Collects the links and sources that a browser would fetch, and checks the nesting of elements."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.details, self.depth = [], 0, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        self.details += tag == "details"
        if tag not in ("meta", "img"):
            self.depth.append(tag)

    def handle_endtag(self, tag):
        assert self.depth.pop() == tag


def test_every_figure_is_drawn_and_its_csv_has_its_numbers(folder, tmp_path):
    drawings = {drawing.name: drawing for drawing in figures.draw_all(load([folder]))}
    assert set(drawings) == NAMES
    for drawing in drawings.values():
        assert drawing.figure is not None, drawing
        ElementTree.fromstring(drawing.svg())
        rows = list(csv.DictReader(io.StringIO(drawing.csv())))
        assert len(rows) == len(drawing.data)
        assert all(
            axis.get_xlabel() and axis.get_ylabel() for axis in drawing.figure.axes if axis.get_label() != "<colorbar>"
        )
    assert drawings["fig4"].data == series.sizes(load([folder]))
    assert figures.figure_data(load([folder])) == {name: drawing.data for name, drawing in drawings.items()}


def test_equal_records_give_equal_bytes(folder):
    first, second = (figures.draw_all(load([folder]))[0].svg() for _ in range(2))
    assert first == second


def test_captions_and_notes_name_the_rule_of_the_choice(folder):
    for by, rule in RULES.items():
        study = load([folder], by)
        assert rule.text in figures.draw_all(study)[0].caption
        assert any(rule.text in note for table in tables.with_ours(study) for note in table.notes)


def test_a_missing_figure_is_explained(tmp_path):
    folder = write(tmp_path / "records", record())
    missing = {drawing.name: drawing.missing for drawing in figures.draw_all(load([folder])) if drawing.missing}
    assert set(missing) == NAMES - {"totals", "curves", "losses"}
    assert missing["fig6-ablation"] == "needs adapterbank ablate"


def test_figures_of_two_encoders_have_two_names(tmp_path):
    folder = write(tmp_path / "records", record(), record(backbone="models/other one"))
    assert {"totals-minilm", "totals-other-one"} <= {drawing.name for drawing in figures.draw_all(load([folder]))}


def test_the_command_writes_figures_and_tables(folder, tmp_path):
    found = shell("figures", "--records", folder, "--out", tmp_path / "out", "--json").json
    assert found["missing"] == {}
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {f"{name}.{end}" for name in NAMES for end in ("csv", "svg", "png")} | {
        "table1.csv",
        "table2.csv",
        "against-full.csv",
    }


def test_the_page_contains_every_record_and_fetches_nothing(folder, tmp_path):
    (folder / "broken.json").write_text("{")
    found = shell("report", "--records", folder, "--out", tmp_path / "deep" / "report.html")
    assert found.code == 0
    assert f"{len(RICH)} runs, 13 figures" in found.out
    text = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.depth == []
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert page.details == len(RICH) + 2 + 2  # the options of all runs and the settings are folded
    embedded = [json.loads(unescape(part)) for part in re.findall(r"<pre>(\{.*?)</pre>", text, re.DOTALL)]
    assert all(one in embedded for one in RICH)
    assert all(f'id="{source[1:]}"' in text for source in page.sources if source.startswith("#"))
    assert "broken.json is left out" in text
    images = [source for source in page.sources if source.startswith("data:image/svg+xml")]
    assert len(images) == 13
    ElementTree.fromstring(base64.b64decode(images[0].split(",", 1)[1]))


def test_a_page_of_few_records_explains_what_is_missing(tmp_path):
    folder = write(tmp_path / "records", record())
    shell("report", "--records", folder, "--out", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Figures that are not drawn: 10" in text
    assert text.count('<li class="missing">') == 10
    assert (
        '<li class="missing">Fig. 6: adapters removed by span of layers (minilm): needs adapterbank ablate</li>' in text
    )


def test_ones_own_study_comes_first_and_the_papers_tables_only_with_its_tasks(tmp_path):
    own = [record("tickets", dev=0.8, test=0.75, lr=lr, seed=seed) for lr in (1e-4, 1e-3) for seed in (0, 1)]
    folder = write(tmp_path / "own", *own)
    text = report.page(load([folder]), figures.draw_all(load([folder])), [str(folder)])
    headings = re.findall(r'<h2 id="([^"]+)"', text)
    assert headings == ["study", "own-figures", "figures", "reproduce", "every-run"]
    assert "Table 1" not in text
    assert "Table 2" not in text
    folder = write(tmp_path / "both", *own, *RICH)
    text = report.page(load([folder]), figures.draw_all(load([folder])), [str(folder)])
    headings = re.findall(r'<h2 id="([^"]+)"', text)
    assert headings == ["study", "own-figures", "tables", "figures", "reproduce", "every-run"]
    tables_of = re.findall(r'<table id="([^"]+)"', text)
    assert tables_of[:4] == ["scores", "settings", "shared", "cost"]
    assert tables_of.index("cost") < tables_of.index("table1") < tables_of.index("table2")


def test_reliability_and_coverage_belong_to_ones_own_study(tmp_path):
    found = {"dev": measured(8)}
    folder = write(tmp_path, *(record("tickets", seed=seed, calibration=found) for seed in (0, 1)))
    text = report.page(load([folder]), figures.draw_all(load([folder])), [str(folder)])
    assert 'id="reliability"' in text
    assert 'id="coverage"' in text
    assert "The paper's" not in text


def test_the_sentence_about_few_seeds_and_the_legend_do_not_overlap(tmp_path):
    found = {"dev": measured(8)}
    folder = write(
        tmp_path, *(record("tickets-of-customers-by-urgency", seed=seed, calibration=found) for seed in (0, 1))
    )
    for drawing in figures.draw_all(load([folder])):
        if drawing.figure and drawing.figure.legends and drawing.figure.get_suptitle():
            drawing.figure.canvas.draw()
            note = drawing.figure._suptitle.get_window_extent()
            assert not any(one.get_window_extent().overlaps(note) for one in drawing.figure.legends), drawing.name


def test_the_contents_list_every_table_and_figure(folder):
    text = report.page(load([folder]), figures.draw_all(load([folder])), [str(folder)])
    contents = text[text.index("<nav") : text.index("</nav>")]
    listed = re.findall(r'href="#([^"]+)"', contents)
    assert {*NAMES, "scores", "settings", "cost", "table1", "table2", "study", "every-run"} <= set(listed)
    assert all(f'id="{name}"' in text for name in listed)


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ((0,), "One seed per point: differences may be chance."),
        ((0, 1), "2 seeds per point: with few seeds, differences may be chance."),
        ((0, 1, 2), ""),
    ],
)
def test_figures_of_few_seeds_say_so_in_the_caption_and_in_the_picture(tmp_path, seeds, said):
    rows = [record("tickets", lr=lr, seed=seed) for lr in (1e-4, 1e-3) for seed in seeds]
    drawn = {one.name: one for one in figures.draw_all(load([write(tmp_path, *rows)])) if one.figure}
    for name in ("fig7", "curves"):
        title = drawn[name].figure._suptitle
        assert (title.get_text().replace("\n", " ") if title else "") == said
        assert drawn[name].caption.endswith(said)


def test_figures_of_few_tasks_say_so(tmp_path):
    rows = [record(task, method) for task in ("glue-cola", "glue-rte") for method in ("full", "adapter")]
    drawn = {one.name: one for one in figures.draw_all(load([write(tmp_path, *rows)]))}
    assert "Only 2 tasks: percentiles across them say little." in drawn["fig1"].caption
    many = [record(f"own-{k}", method, seed=s) for k in range(5) for method in ("full", "adapter") for s in range(3)]
    drawn = {one.name: one for one in figures.draw_all(load([write(tmp_path / "many", *many)]))}
    assert "Only" not in drawn["fig1"].caption


def test_figures_have_the_titles_of_tasks(folder):
    drawn = {one.name: one.figure for one in figures.draw_all(load([folder])) if one.figure}
    assert {axis.get_title() for axis in drawn["fig4"].axes} == {"MNLI", "CoLA"}
    assert {axis.get_title() for axis in drawn["curves"].axes} == {"MNLI", "CoLA", "Airline", "SQuAD 1.1"}


def test_pictures_have_300_dots_per_inch(folder, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="matplotlib brings it")
    (drawing,) = [one for one in figures.draw_all(load([folder])) if one.name == "totals"]
    drawing.write(tmp_path / "out")
    with image.open(tmp_path / "out" / "totals.png") as picture:
        assert picture.info["dpi"] == pytest.approx((300, 300), abs=0.1)


def test_a_page_without_records_is_still_a_page(tmp_path):
    folder = write(tmp_path / "records")
    found = shell("report", "--records", folder, "--out", tmp_path / "report.html")
    assert found.code == 0
    assert "0 runs" in found.out
    note = f"note: There are no runs in {folder}; create some with adapterbank train or adapterbank sweep."
    assert found.err.splitlines() == [note]
    assert shell("figures", "--records", folder, "--out", tmp_path / "out").err.splitlines() == [note]


def test_a_folder_in_place_of_the_page_is_reported_by_name(folder, tmp_path):
    found = shell("report", "--records", folder, "--out", tmp_path)
    assert (found.code, f"{tmp_path} is a folder; give the path of a file" in found.err) == (2, True)


def test_axes_name_the_quantities(folder, tmp_path):
    write(folder, *(record("glue-mnli", lr=lr, dev=0.6) for lr in (1.5e-4, 2e-4)))
    write(folder, record("glue-rte", "full"), record("glue-rte", method="layernorm"))
    drawings = {drawing.name: drawing.figure for drawing in figures.draw_all(load([folder]))}
    ticks = [tick.get_text() for axis in drawings["fig7"].axes for tick in axis.get_xticklabels()]
    assert "1.5e-4" in ticks
    assert drawings["fig1"].axes[0].get_title() == "all tasks: 1 to 4 tasks per point"


def test_an_improvement_without_adapters_is_visible_in_the_heatmap(tmp_path):
    found = ablation(layers=3)
    found["spans"][0]["change"]["accuracy"] = 4.0
    drawings = figures.draw_all(load([write(tmp_path, record(), ablations=(found,))]))
    (image,) = next(d.figure for d in drawings if d.name == "fig6-ablation").axes[0].images
    assert image.get_clim() == (-3.0, 4.0)


def test_a_missing_folder_and_a_missing_library_are_reported(folder, tmp_path, monkeypatch):
    found = shell("figures", "--records", tmp_path / "none", "--out", tmp_path / "out")
    assert (found.code, "no folder of records" in found.err) == (2, True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = shell("report", "--records", folder, "--out", tmp_path / "report.html")
    assert (found.code, extra_command("plot") in found.err) == (2, True)


def test_the_command_of_a_record_has_its_config():
    config = record(lr=3e-4, size=8, inner_norm=True, train_norms=False, dropout=0.2)["config"]
    words = report.command(config).split()
    assert words[:6] == ["adapterbank", "train", "--bank", "bank", "--task", "glue-cola"]
    assert {"--inner-norm", "--no-train-norms"} <= set(words)
    pairs = dict(itertools.pairwise(words))
    again = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs.items() if name.startswith("--")}
    again = {name: value for name, value in again.items() if not value.startswith("--") and name != "bank"}
    again |= {"inner_norm": True, "train_norms": False}
    again.pop("no_train_norms", None)
    assert configs.resolve(configs.parse(again)).to_json() == {
        name: config[name] for name in configs.Config().to_json()
    }


def test_the_page_reads_well(tmp_path):
    other = record(backbone="other")
    twice = (ablation(), ablation("glue-mnli@1"))
    folder = write(tmp_path / "some records", record(), other, ablations=twice)
    (folder / "ablations" / "again.json").write_text(json.dumps(ablation()))
    shell("report", "--records", folder, "--out", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2 runs, 1 task, on minilm, other, 3 ablations." in text
    assert f"--records &#x27;{folder}&#x27;" in text
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert '<td class="word">glue-cola</td>' in text
    drawn = [d for d in figures.draw_all(load([folder])) if d.figure]
    assert all(drawing.caption in unescape(text) for drawing in drawn)


def test_the_anchor_of_a_record_is_inside_the_element_that_it_opens(folder):
    text = report.page(load([folder]), [], [str(folder)])
    assert re.search(r'<details><summary>[^<]+</summary><div id="record-', text)
    assert '<details id="' not in text


def test_the_notes_of_runs_are_listed_once_with_links_to_their_records(tmp_path):
    told = "The model predicts '<b>' for every dev row."
    made = [{**record("glue-cola", dev=0.5, seed=seed), "notes": [told]} for seed in (0, 1)]
    page = report.page(load([write(tmp_path, *made)]), [], [str(tmp_path)])
    (listed,) = re.findall(r'<ul id="notes">(.*?)</ul>', page, re.DOTALL)
    assert unescape(listed).count(told) == 1
    assert "<b>" not in listed
    targets = re.findall(r'href="#(.*?)"', listed)
    assert len(targets) == 2
    assert all(f'id="{target}"' in page for target in targets)
