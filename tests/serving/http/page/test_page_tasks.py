"""Promise: the page shows the tasks in a real browser: the list, the totals, and banks with few or many tasks."""

from __future__ import annotations

import json

import pytest

from serving.http.page.browsing import BROWSER, DRAWN, expect
from serving.sample_server import MARKUP, SampleService, sample_tasks, task

pytestmark = BROWSER


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
    expect(page.locator("#tasks-list .chip", has_text=MARKUP)).to_have_count(1)
    page.goto(f"{url}/#try/markup")
    page.get_by_label("Text", exact=True).fill(MARKUP)
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".prediction")).to_have_text(MARKUP)
    page.goto(f"{url}/#task/markup")
    expect(page.locator("#task-body .chip").first).to_have_text(MARKUP)
    page.goto(f"{url}/#task/{MARKUP.replace('/', '')}")
    expect(page.locator("#trouble")).to_contain_text("is not a task of this bank")
    assert page.locator("main img").count() == 0


def test_a_task_shows_what_its_training_told(page, url):
    page.goto(f"{url}/#task/task-00")
    expect(page.locator("#task-body .note")).to_have_text(f"No dev data given for {MARKUP}.")


class TestProblemsInTheBank:
    @pytest.fixture
    def service(self):
        found = SampleService(sample_tasks(10), [{"task": "broken", "message": "broken@2 is damaged; restore it."}])
        found.removed.add("task-07")
        return found

    def test_problems_are_shown(self, page):
        expect(page.locator("#problems")).to_contain_text("1 task of the bank cannot be served")
        expect(page.locator("#problems li")).to_have_text("broken: broken@2 is damaged; restore it.")

    def test_a_refused_task_does_not_prevent_the_predictions_of_others(self, page, url, complaints):
        complaints.append("404")
        page.goto(f"{url}/#try")
        page.get_by_label("Text", exact=True).fill("A text")
        page.get_by_role("button", name="Predict").click()
        expect(page.locator("#try-result h2")).to_have_text("9 tasks, most confident first")
        expect(page.locator(".answer").last).to_contain_text("'task-07' is not a task of this bank.")


class TestAnEmptyBank:
    @pytest.fixture
    def service(self):
        return SampleService([])

    def test_an_empty_bank_explains_how_to_add_a_task(self, page):
        expect(page.locator("#tasks-empty")).to_contain_text("The bank has no tasks yet")
        expect(page.locator("#tasks-empty")).to_contain_text("adapterbank train --bank bank")
        for part in ("#totals", "#tasks-tools", "#tasks-list"):
            expect(page.locator(part)).to_be_hidden()
        page.get_by_role("link", name="upload a file").click()
        expect(page.get_by_role("heading", name="Train a task")).to_be_visible()

    def test_an_empty_bank_links_to_training(self, page):
        page.get_by_role("link", name="Try", exact=True).click()
        page.get_by_label("Text", exact=True).fill("A warm film.")
        page.get_by_role("button", name="Predict").click()
        expect(page.locator("#try-result")).to_have_text("The bank has no tasks yetTrain one, then try it here.")


class TestAThousandTasks:
    @pytest.fixture
    def service(self):
        return SampleService([task(f"task-{i}") for i in range(1000)])

    def test_a_part_is_drawn_and_the_rest_on_demand(self, page, faults, url):
        expect(page.locator("#tasks-list .task")).to_have_count(100)
        page.get_by_role("button", name="Show all 1,000").click()
        expect(page.locator("#tasks-list .task")).to_have_count(1000)
        page.goto(f"{url}/#try")
        page.get_by_label("Text", exact=True).fill("A text")
        page.get_by_role("button", name="Predict").click()
        expect(page.locator("#try-result h2")).to_have_text("1,000 tasks, most confident first")
        sizes = [len(json.loads(body)["rows"]) for _, path, body in faults.requests if path == "/v1/predict"]
        assert sum(sizes) == 1000
        assert max(sizes) <= 64


def test_a_late_error_is_not_shown_in_another_section(page, faults, url, complaints):
    complaints.append("404")
    expect(page.locator("#tasks-list li")).to_have_count(50)
    faults.paused = True
    page.goto(f"{url}/#task/none")
    expect(page.locator("#task-title")).to_have_text("none")
    with page.expect_response("**/v1/tasks/none") as late:
        page.goto(f"{url}/#tasks")
        expect(page.locator("#view-tasks")).to_be_visible()
        faults.paused = False
    late.value.finished()
    page.evaluate(DRAWN)
    expect(page.locator("#trouble")).to_be_hidden()


def test_an_invalid_address_shows_the_tasks_or_an_error(page, url, complaints):
    complaints.append("404")
    page.goto(f"{url}/#nothing/here")
    expect(page.get_by_role("heading", name="Tasks")).to_be_visible()
    page.goto(f"{url}/#task/100%")
    expect(page.locator("#trouble")).to_contain_text("is not a task of this bank")
