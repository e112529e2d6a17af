"""Claims about the page, in a real browser over a stand-in server: what it shows, what it sends, what it never does."""

# ruff: noqa: E402 (what may be missing is looked for before it is imported)
from __future__ import annotations

import copy
import json
import os
import re

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

from adapterbank.serving.routes_page import page_router
from stand_in import NASTY, Trouble, make, many, served, task

CHROMIUM = os.environ.get("ADAPTERBANK_CHROMIUM", "/usr/bin/chromium")
PATIENCE = 120_000
"""Milliseconds after which what takes a moment has failed, however busy the machine is."""
expect = playwright.expect
expect.set_options(timeout=PATIENCE)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not os.path.exists(CHROMIUM), reason=f"there is no Chromium at {CHROMIUM}"),
]


DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Waits until the page has heard of what happened, and shows it."""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def trouble():
    return Trouble()


@pytest.fixture
def bank():
    """Give the tasks and the problems of the bank; tests may have their own."""
    return many(), []


@pytest.fixture
def url(bank, trouble):
    app = make(bank[0], trouble, bank[1])
    app.include_router(page_router())
    with served(app) as address:
        yield address


@pytest.fixture
def complaints():
    """What the console may say, as a pattern; everything else fails the test."""
    return []


@pytest.fixture(params=[360, 1280], ids=["phone", "desk"])
def width(request):
    return request.param


@pytest.fixture
def page(browser, url, complaints, width):
    """Give a page that fails its test when it logs an error, asks another server or is wider than its screen."""
    context = browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(PATIENCE)
    # What the page does every ten seconds it does when a test says so, or a slow test would see more than it asked for.
    context.add_init_script("window.setInterval = (work) => { window.look = work; };")
    page = context.new_page()
    errors, asked = [], []
    page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert [one for one in errors if not any(re.search(known, one) for known in complaints)] == []
    assert [one for one in asked if not one.startswith((f"{url}/", "data:"))] == []
    assert page.title() != "taken"
    context.close()


def sent(trouble):
    """Give the bodies that were posted, as values."""
    return [json.loads(body) for method, _, body in trouble.asked if method == "POST"]


def test_tasks_are_listed_with_score_size_labels_and_age(page):
    rows = page.locator("#tasks-list li")
    expect(rows).to_have_count(50)
    row = page.locator("#tasks-list li", has_text="task-03")
    for words in ("0.5297", "accuracy", "adapter 64", "2.67 %", "2.43 MB", "ago", "positive", "v1"):
        expect(row).to_contain_text(words)
    expect(page.locator("#tasks-about")).to_have_text(
        "One frozen encoder, minilm (22.7 million parameters), serves 50 tasks."
    )


def test_the_filter_and_the_order_choose_among_them(page):
    page.get_by_label("Filter").fill("hypo entail")
    expect(page.locator("#tasks-count")).to_have_text("No task matches the filter.")
    page.get_by_label("Filter").fill("task-1")
    expect(page.locator("#tasks-list li")).to_have_count(10)
    page.get_by_label("Sort by").select_option("score")
    expect(page.locator("#tasks-list .name").first).to_have_text("task-19")


def test_all_tasks_together_are_compared_with_one_model_each(page):
    picture = page.locator("#totals")
    expect(picture.locator("figcaption")).to_have_text("50 tasks in 21.4× fewer parameters")
    expect(picture).to_contain_text("53.0 million")
    expect(picture).to_contain_text("1.14 billion")
    expect(picture.locator("svg").nth(1).locator("rect")).to_have_count(50)
    encoder, trained = (float(box.get_attribute("width")) for box in picture.locator("svg").first.locator("rect").all())
    assert trained / encoder == pytest.approx(50 * 605_954 / 22_713_216, rel=1e-3)


def test_labels_and_texts_are_text_whatever_they_look_like(page, url, complaints):
    complaints.append("404")
    expect(page.locator("#tasks-list .chip", has_text=NASTY)).to_have_count(1)
    page.goto(f"{url}/#try/markup")
    page.get_by_label("Text", exact=True).fill(NASTY)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".said")).to_have_text(NASTY)
    page.goto(f"{url}/#task/markup")
    expect(page.locator("#task-body .chip").first).to_have_text(NASTY)
    page.goto(f"{url}/#task/{NASTY.replace('/', '')}")
    expect(page.locator("#trouble")).to_contain_text("is not a task here")
    assert page.locator("main img").count() == 0


def test_a_text_is_tried_on_one_task(page, trouble):
    page.get_by_role("link", name="Try", exact=True).click()
    page.locator("#try-task").select_option("task-03")
    expect(page.locator("#try-pair-row")).to_be_hidden()
    page.get_by_label("Text", exact=True).fill("A warm film.")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".said")).to_have_text("negative")
    expect(page.get_by_role("status").filter(has_text="negative")).to_have_count(1)
    expect(page.locator(".odds")).to_contain_text("79.0 %")
    assert sent(trouble) == [{"text": "A warm film."}]


def test_nothing_is_asked_before_the_task_of_the_address_is_chosen(page, url, trouble):
    trouble.held = True
    page.goto(f"{url}/#try/task-03")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    expect(page.get_by_role("button", name="Ask")).to_be_disabled()
    page.keyboard.press("Control+Enter")
    trouble.held = False
    page.get_by_role("button", name="Ask").click()  # as soon as it can be
    expect(page.locator(".said")).to_have_text("negative")
    assert [path for method, path, _ in trouble.asked if method == "POST"] == ["/v1/tasks/task-03/predict"]


def test_a_task_that_is_served_late_is_chosen_once_it_is(page, url, trouble):
    expect(page.locator("#tasks-list .task")).to_have_count(50)
    trouble.late = {"task-49"}
    page.goto(f"{url}/#try/task-49")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    expect(page.locator("#try-task")).to_have_value("")
    trouble.late = set()
    page.evaluate("look()")
    expect(page.locator("#try-task")).to_have_value("task-49")


def test_who_has_asked_all_tasks_is_not_led_to_a_late_one(page, url, trouble):
    expect(page.locator("#tasks-list .task")).to_have_count(50)
    trouble.late = {"task-49"}
    page.goto(f"{url}/#try/task-49")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-result h2")).to_have_text("46 tasks, surest first")
    trouble.late = set()
    page.evaluate("look()")
    expect(page.locator("#try-task option")).to_have_count(51)
    expect(page.locator("#try-task")).to_have_value("")
    expect(page.locator("#try-result h2")).to_have_text("46 tasks, surest first")


def test_an_answer_that_comes_late_is_not_shown_under_another_task(page, url, trouble):
    page.goto(f"{url}/#try/task-03")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    trouble.held = True
    with page.expect_response("**/predict") as late:
        page.get_by_role("button", name="Ask").click()
        page.locator("#try-task").select_option("task-04")
        trouble.held = False
    late.value.finished()
    page.evaluate(DRAWN)
    expect(page.locator("#try-result")).to_be_empty()
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-result")).to_contain_text("task-04, version 1")


def test_a_task_of_two_texts_asks_for_both_and_an_answer_is_marked_in_its_text(page, trouble, url):
    page.goto(f"{url}/#try/task-15")
    expect(page.locator("#try-task")).to_have_value("task-15")
    page.get_by_label("question").fill("Who did it?")
    page.get_by_label("context").fill("Alice \N{GRINNING FACE} did it.")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("mark")).to_have_text("Alice")
    assert sent(trouble) == [{"text": "Who did it?", "pair": "Alice \N{GRINNING FACE} did it."}]


def test_a_text_is_tried_on_all_tasks_at_once_surest_first(page, trouble, url):
    page.goto(f"{url}/#try")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-result h2")).to_have_text("47 tasks, surest first")
    told = page.locator(".answer .number").all_inner_texts()
    shares = [float(one.removesuffix("\N{NO-BREAK SPACE}%")) for one in told]
    assert len(shares) > 30
    assert shares == sorted(shares, reverse=True)
    rows = sent(trouble)[-1]["rows"]
    assert len(rows) == 47
    assert {"task": "task-03", "text": "A warm film."} in rows
    page.get_by_label("Second text (optional)").fill("It was warm.")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-result h2")).to_have_text("50 tasks, surest first")
    assert {"task": "entailment", "text": "A warm film.", "pair": "It was warm."} in sent(trouble)[-1]["rows"]


class TestTroubleInTheBank:
    @pytest.fixture
    def bank(self):
        gone = [{**one, "gone": True} if one["name"] == "task-07" else one for one in many(10)]
        return gone, [{"task": "broken", "message": "broken@2 is not what was written; restore it."}]

    def test_problems_are_told_plainly(self, page):
        expect(page.locator("#problems")).to_contain_text("1 task of the bank cannot be served")
        expect(page.locator("#problems li")).to_have_text("broken: broken@2 is not what was written; restore it.")

    def test_a_task_that_is_refused_leaves_the_others_their_answers(self, page, url, complaints):
        complaints.append("404")
        page.goto(f"{url}/#try")
        page.get_by_label("Text", exact=True).fill("A text")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#try-result h2")).to_have_text("9 tasks, surest first")
        expect(page.locator(".answer").last).to_contain_text("'task-07' is not a task here.")


class TestAnEmptyBank:
    @pytest.fixture
    def bank(self):
        return [], []

    def test_it_tells_how_to_add_a_task(self, page):
        expect(page.locator("#tasks-empty")).to_contain_text("The bank has no tasks yet")
        expect(page.locator("#tasks-empty")).to_contain_text("adapterbank train --bank bank")
        for part in ("#totals", "#tasks-tools", "#tasks-list"):
            expect(page.locator(part)).to_be_hidden()
        page.get_by_role("link", name="upload a file").click()
        expect(page.get_by_role("heading", name="Train a task")).to_be_visible()


class TestAThousandTasks:
    @pytest.fixture
    def bank(self):
        return [task(f"task-{i}") for i in range(1000)], []

    def test_a_part_is_drawn_and_the_rest_on_demand(self, page, trouble, url):
        expect(page.locator("#tasks-list .task")).to_have_count(100)
        page.get_by_role("button", name="Show all 1,000").click()
        expect(page.locator("#tasks-list .task")).to_have_count(1000)
        page.goto(f"{url}/#try")
        page.get_by_label("Text", exact=True).fill("A text")
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#try-result h2")).to_have_text("1,000 tasks, surest first")
        sizes = [len(json.loads(body)["rows"]) for _, path, body in trouble.asked if path == "/v1/predict"]
        assert sum(sizes) == 1000
        assert max(sizes) <= 64


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_ablation_is_shown_as_a_table_with_readable_values(page, url, theme):
    page.emulate_media(color_scheme=theme)
    page.evaluate(DRAWN)  # and draws again for it, which must not fall between the looks below
    page.goto(f"{url}/#task/task-00")
    table = page.locator(".heat")
    expect(table.locator("tbody tr")).to_have_count(6)
    expect(table.locator("tbody tr").first.locator("td").last).to_have_text("-30.0")
    expect(table.locator("tbody td:not(:empty)")).to_have_count(21)
    colours = "(cell) => [getComputedStyle(cell).color, getComputedStyle(cell).backgroundColor]"
    for cell in table.locator("tbody td:not(:empty)").all():
        ink, ground = (tuple(map(int, re.findall(r"\d+", one)))[:3] for one in cell.evaluate(colours))
        assert contrast(ink, ground) >= 4.5


def contrast(one, other):
    """Give the ratio of two colours' lightness, as WCAG counts it."""

    def light(colour):
        linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))


@pytest.fixture
def reviews(tmp_path):
    file = tmp_path / "my reviews.csv"
    file.write_text(
        'id,"review, as written",stars\n1,"Warm, and ""funny"".",5\n2,"Dull\nand long.",1\n', encoding="utf-8"
    )
    return file


def upload(page, file):
    page.get_by_role("link", name="Train", exact=True).click()
    page.locator("#train-file").set_input_files(str(file))
    expect(page.get_by_label("Label column")).to_be_visible()  # it has been read


def test_a_files_columns_are_read_in_the_browser_and_sent_with_the_file(page, trouble, reviews):
    upload(page, reviews)
    expect(page.locator("#train-preview thead")).to_have_text("idreview, as writtenstars")
    expect(page.locator("#train-preview tbody tr").first).to_contain_text('Warm, and "funny".')
    expect(page.get_by_label("Label column")).to_have_value("stars")
    expect(page.get_by_label("Task name")).to_have_value("my-reviews")
    page.get_by_label("Text column").select_option("review, as written")
    page.get_by_label("Epochs").fill("2")
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-title")).to_have_text("my-reviews done")
    (sent,) = [body for method, path, body in trouble.asked if path == "/v1/tasks/my-reviews/train"]
    assert sent == reviews.read_bytes()
    assert trouble.runs["run1"]["options"] == {
        **{"format": "csv", "size": "64", "epochs": "2", "text": "review, as written", "label": "stars"},
    }


def test_a_runs_curves_grow_while_it_goes(page, trouble, reviews):
    trouble.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-title .badge")).to_have_text("running")
    expect(page.locator("#run-body")).to_contain_text("step 2 of 6")
    expect(page.locator(".curve.score")).to_contain_text("After the first epoch.")
    trouble.steps = 3
    expect(page.locator(".curve.score svg")).to_have_attribute("aria-label", "Score on dev by epoch: 0.7000")
    trouble.steps = 6
    expect(page.locator("#run-title .badge")).to_have_text("done")
    expect(page.locator(".curve.loss svg")).to_have_attribute(
        "aria-label", "Loss on the training data by epoch: 0.6000, 0.3000"
    )
    expect(page.locator(".curve.score .dot")).to_have_count(2)
    expect(page.get_by_role("status").filter(has_text="Version 1 of my-reviews is served")).to_be_visible()
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("#runs li")).to_contain_text("best on dev 0.8000")


def test_an_answer_about_a_run_that_comes_late_does_not_take_it_back(page, trouble, reviews):
    late = []

    def hold(route):
        if late:
            route.continue_()
        else:
            late.append((route, copy.deepcopy(trouble.runs["run1"])))

    trouble.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-body")).to_contain_text("step 2 of 6")
    page.route("**/v1/runs/run1", hold)
    trouble.steps = 3
    while not late:
        page.wait_for_timeout(10)
    trouble.steps = 6
    expect(page.locator("#run-title .badge")).to_have_text("done")
    route, before = late.pop()
    with page.expect_event("requestfinished", lambda request: request == route.request):
        route.fulfill(json=before)
    page.evaluate(DRAWN)
    expect(page.locator("#run-title .badge")).to_have_text("done")


def test_a_run_can_be_cancelled(page, trouble, reviews):
    trouble.steps = 1
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator("#run-body")).to_contain_text("The run was cancelled; the bank is as it was.")
    assert ("DELETE", "/v1/runs/run1", b"") in trouble.asked


def test_a_run_that_failed_tells_why(page, trouble, url):
    trouble.runs["r"] = {
        "id": "r",
        "task": "mine",
        "state": "failed",
        "failure": "The label column is empty.",
        "history": [],
    }
    page.goto(f"{url}/#run/r")
    expect(page.get_by_role("alert").filter(has_text="The label column is empty.")).to_be_visible()


def test_a_server_that_does_not_train_is_told_as_one(page, trouble, url, complaints):
    complaints.append("404")
    expect(page.locator("#tasks-list li")).to_have_count(50)
    trouble.refuse = [(404, "not_found", {})]
    page.evaluate("location.hash = '#train'")
    expect(page.locator("#trouble")).to_contain_text("not_found")
    trouble.refuse = []
    page.route("**/v1/runs", lambda route: route.fulfill(status=404, json={"error": {"code": "not_found"}}))
    page.goto(f"{url}/#tasks")
    page.goto(f"{url}/#train")
    expect(page.locator("#runs")).to_contain_text("This server does not train")
    expect(page.locator("#train-form")).to_be_hidden()


def test_an_error_is_shown_as_the_servers_sentence(page, trouble, url, complaints):
    complaints += ["422", "404"]
    page.goto(f"{url}/#try/task-03")
    expect(page.locator("#try-task")).to_have_value("task-03")
    trouble.refuse = [(422, "text_too_long", {})]
    page.get_by_label("Text", exact=True).fill("long")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#try-result [role=alert]")).to_have_text("Refused with text_too_long.")
    page.goto(f"{url}/#run/none")
    expect(page.locator("#trouble")).to_have_text("There is no run 'none'.")
    page.goto(f"{url}/#tasks")
    expect(page.locator("#trouble")).to_be_hidden()


def test_an_error_that_comes_late_is_not_told_of_another_part(page, trouble, url, complaints):
    complaints.append("404")
    expect(page.locator("#tasks-list li")).to_have_count(50)
    trouble.held = True
    page.goto(f"{url}/#task/none")
    expect(page.locator("#task-title")).to_have_text("none")
    with page.expect_response("**/v1/tasks/none") as late:
        page.goto(f"{url}/#tasks")
        expect(page.locator("#view-tasks")).to_be_visible()
        trouble.held = False
    late.value.finished()
    page.evaluate(DRAWN)
    expect(page.locator("#trouble")).to_be_hidden()


def test_an_overloaded_server_is_asked_again(page, trouble, url, complaints):
    complaints.append("429")
    page.goto(f"{url}/#try/task-03")
    expect(page.locator("#try-task")).to_have_value("task-03")
    trouble.refuse = [(429, "overloaded", {"Retry-After": "0"})]
    page.get_by_label("Text", exact=True).fill("A text")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".said")).to_have_text("negative")


class TestKeys:
    @pytest.fixture
    def trouble(self):
        return Trouble(key="secret")

    def test_a_key_is_asked_for_and_kept_for_the_tab(self, page, trouble, complaints, reviews):
        complaints.append("401")
        expect(page.get_by_role("dialog")).to_contain_text("This server wants a key")
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Go on").click()
        expect(page.get_by_label("API key")).to_have_value("")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#tasks-list .task")).to_have_count(50)
        assert page.evaluate("[Object.values(sessionStorage), Object.keys(localStorage), document.cookie]") == [
            ["secret"],
            [],
            "",
        ]
        page.reload()
        expect(page.locator("#tasks-list .task")).to_have_count(50)
        upload(page, reviews)
        page.get_by_role("button", name="Train").click()
        expect(page.locator("#run-title .badge")).to_have_text("done")
        page.get_by_role("button", name="Forget the key").click()
        expect(page.get_by_role("dialog")).to_be_visible()

    def test_without_one_the_servers_sentence_is_shown(self, page, complaints):
        complaints.append("401")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#trouble")).to_contain_text("This server wants a key")


def test_an_address_that_makes_no_sense_shows_the_tasks_or_says_so(page, url, complaints):
    complaints.append("404")
    page.goto(f"{url}/#nothing/here")
    expect(page.get_by_role("heading", name="Tasks")).to_be_visible()
    page.goto(f"{url}/#task/100%")
    expect(page.locator("#trouble")).to_contain_text("is not a task here")


def test_it_is_used_by_keyboard_alone(page):
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Try", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Try", exact=True)).to_have_attribute("aria-current", "page")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#try-task")).to_be_focused()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out_from_their_ground_in_light_and_dark(page, theme):
    page.emulate_media(color_scheme=theme)
    names = ("paper", "card", "ink", "quiet", "accent", "on-accent", "bad", "bad-soft", "good", "track", "soft")
    script = "(names) => names.map((one) => getComputedStyle(document.body).getPropertyValue(`--${one}`).trim())"
    found = dict(zip(names, page.evaluate(script, list(names)), strict=True))
    colour = {name: tuple(int(value[i : i + 2], 16) for i in (1, 3, 5)) for name, value in found.items()}
    grounds = {
        **{"ink": "paper card track", "quiet": "paper card", "accent": "card paper soft"},
        **{"on-accent": "accent", "bad": "bad-soft", "good": "track"},
    }
    pairs = [(one, other) for one, others in grounds.items() for other in others.split()]
    for one, other in pairs:
        assert contrast(colour[one], colour[other]) >= 4.5, (one, other)
