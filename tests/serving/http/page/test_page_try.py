"""Claims about trying texts on the page, in a real browser: what is asked, what is shown, whatever comes late."""

from __future__ import annotations

from serving.http.page.browsing import BROWSER, DRAWN, expect, sent

pytestmark = BROWSER


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


def test_an_overloaded_server_is_asked_again(page, trouble, url, complaints):
    complaints.append("429")
    page.goto(f"{url}/#try/task-03")
    expect(page.locator("#try-task")).to_have_value("task-03")
    trouble.refuse = [(429, "overloaded", {"Retry-After": "0"})]
    page.get_by_label("Text", exact=True).fill("A text")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator(".said")).to_have_text("negative")
