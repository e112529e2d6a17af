"""Promise: the page tries texts, in a real browser: what is sent and shown, also when responses are late."""

from __future__ import annotations

from serving.http.page.browsing import BROWSER, DRAWN, expect, posted

pytestmark = BROWSER


def test_a_text_is_tried_on_one_task(page, faults):
    page.get_by_role("link", name="Try", exact=True).click()
    page.locator("#try-task").select_option("task-03")
    expect(page.locator("#try-pair-row")).to_be_hidden()
    page.get_by_label("Text", exact=True).fill("A warm film.")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".prediction")).to_have_text("negative")
    expect(page.get_by_role("status").filter(has_text="negative")).to_have_count(1)
    expect(page.locator(".odds")).to_contain_text("79.0 %")
    assert posted(faults) == [{"text": "A warm film."}]


def test_an_answer_tells_how_a_long_text_was_read(page, url):
    page.goto(f"{url}/#try/task-10")
    expect(page.locator("#try-task")).to_have_value("task-10")
    page.get_by_label("Text", exact=True).fill("word " * 300)
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#try-result .quiet").first).to_contain_text(
        "read in 8 windows, a part of the text was not read"
    )
    expect(page.locator(".prediction")).to_have_text("150")


def test_the_words_of_a_text_are_coloured_by_their_share(page, url, faults):
    page.goto(f"{url}/#try/task-10")  # answers with a tenth of the length
    expect(page.locator("#try-task")).to_have_value("task-10")
    text = "\N{GRINNING FACE} a longer word"
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_label("Show each word's share").check()
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".explained")).to_have_text(text)
    expect(page.locator(".share")).to_have_text(["\N{GRINNING FACE}", "a", "longer", "word"])
    expect(page.locator(".share").nth(2)).to_have_attribute("title", "longer +0.70")
    expect(page.locator(".shares")).to_contain_text("Without “longer”, the value would be 0.7000 lower.")
    page.get_by_text("As a table").click()
    expect(page.locator(".shares tbody tr").first).to_have_text("longer+0.70")
    assert posted(faults) == [{"text": text, "explain": True}]
    page.locator("#try-task").select_option("")
    expect(page.get_by_label("Show each word's share")).to_be_hidden()


def test_both_texts_of_a_pair_are_coloured(page, url):
    page.goto(f"{url}/#try/entailment")
    expect(page.locator("#try-task")).to_have_value("entailment")
    page.get_by_label("premise").fill("A warm film.")
    page.get_by_label("hypothesis").fill("It was warm.")
    page.get_by_label("Show each word's share").check()
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".explained")).to_have_text(["A warm film.", "It was warm."])


def test_an_emptied_text_clears_its_answer_also_one_that_is_late(page, url, faults):
    page.goto(f"{url}/#try/task-03")
    expect(page.locator("#try-task")).to_have_value("task-03")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".prediction")).to_have_text("negative")
    page.get_by_label("Text", exact=True).fill("")
    expect(page.locator("#try-result")).to_be_empty()
    page.get_by_label("Text", exact=True).fill("Dull.")
    faults.paused = True
    with page.expect_response("**/predict") as late:
        page.get_by_role("button", name="Predict").click()
        page.get_by_label("Text", exact=True).fill(" ")
        faults.paused = False
    late.value.finished()
    page.evaluate(DRAWN)
    expect(page.locator("#try-result")).to_be_empty()
    expect(page.get_by_role("button", name="Predict")).to_be_enabled()


def test_nothing_is_sent_before_the_task_of_the_address_is_chosen(page, url, faults):
    faults.paused = True
    page.goto(f"{url}/#try/task-03")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    expect(page.get_by_role("button", name="Predict")).to_be_disabled()
    page.keyboard.press("Control+Enter")
    faults.paused = False
    page.get_by_role("button", name="Predict").click()  # as soon as it can be
    expect(page.locator(".prediction")).to_have_text("negative")
    assert [path for method, path, _ in faults.requests if method == "POST"] == ["/v1/tasks/task-03/predict"]


def test_a_task_that_is_served_late_is_chosen_as_soon_as_it_is_served(page, url, service):
    expect(page.locator("#tasks-list .task")).to_have_count(50)
    service.hidden = {"task-49"}
    page.goto(f"{url}/#try/task-49")
    expect(page.get_by_role("button", name="Predict")).to_be_enabled()
    expect(page.locator("#try-task")).to_have_value("")
    service.hidden = set()
    page.evaluate("look()")
    expect(page.locator("#try-task")).to_have_value("task-49")


def test_a_reader_who_tried_all_tasks_is_not_moved_to_a_late_one(page, url, service):
    expect(page.locator("#tasks-list .task")).to_have_count(50)
    service.hidden = {"task-49"}
    page.goto(f"{url}/#try/task-49")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#try-result h2")).to_have_text("46 tasks, most confident first")
    service.hidden = set()
    page.evaluate("look()")
    expect(page.locator("#try-task option")).to_have_count(51)
    expect(page.locator("#try-task")).to_have_value("")
    expect(page.locator("#try-result h2")).to_have_text("46 tasks, most confident first")


def test_a_late_prediction_is_not_shown_under_another_task(page, url, faults):
    page.goto(f"{url}/#try/task-03")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    expect(page.get_by_role("button", name="Predict")).to_be_enabled()
    faults.paused = True
    with page.expect_response("**/predict") as late:
        page.get_by_role("button", name="Predict").click()
        page.locator("#try-task").select_option("task-04")
        faults.paused = False
    late.value.finished()
    page.evaluate(DRAWN)
    expect(page.locator("#try-result")).to_be_empty()
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#try-result")).to_contain_text("task-04, version 1")


def test_a_task_of_two_texts_has_two_fields_and_an_answer_is_marked_in_its_text(page, url, faults):
    page.goto(f"{url}/#try/task-15")
    expect(page.locator("#try-task")).to_have_value("task-15")
    page.get_by_label("question").fill("Who did it?")
    page.get_by_label("context").fill("Alice \N{GRINNING FACE} did it.")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("mark")).to_have_text("Alice")
    assert posted(faults) == [{"text": "Who did it?", "pair": "Alice \N{GRINNING FACE} did it."}]


def test_a_text_is_tried_on_all_tasks_at_once_most_confident_first(page, url, faults):
    page.goto(f"{url}/#try")
    page.get_by_label("Text", exact=True).fill("A warm film.")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#try-result h2")).to_have_text("47 tasks, most confident first")
    shares = page.locator(".answer .number").all_inner_texts()
    shares = [float(one.removesuffix("\N{NO-BREAK SPACE}%")) for one in shares]
    assert len(shares) > 30
    assert shares == sorted(shares, reverse=True)
    rows = posted(faults)[-1]["rows"]
    assert len(rows) == 47
    assert {"task": "task-03", "text": "A warm film."} in rows
    page.get_by_label("Second text (optional)").fill("It was warm.")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#try-result h2")).to_have_text("50 tasks, most confident first")
    assert {"task": "entailment", "text": "A warm film.", "pair": "It was warm."} in posted(faults)[-1]["rows"]


def test_an_error_is_shown_with_the_servers_message(page, url, complaints, faults):
    complaints += ["422", "404"]
    page.goto(f"{url}/#try/task-03")
    expect(page.locator("#try-task")).to_have_value("task-03")
    faults.refuse = [(422, "text_too_long", {})]
    page.get_by_label("Text", exact=True).fill("long")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator("#try-result [role=alert]")).to_have_text("Refused with text_too_long.")
    page.goto(f"{url}/#run/none")
    expect(page.locator("#trouble")).to_contain_text("There is no run 'none'")
    page.goto(f"{url}/#tasks")
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_request_is_sent_again_to_an_overloaded_server(page, url, complaints, faults):
    complaints.append("429")
    page.goto(f"{url}/#try/task-03")
    expect(page.locator("#try-task")).to_have_value("task-03")
    faults.refuse = [(429, "overloaded", {"Retry-After": "0"})]
    page.get_by_label("Text", exact=True).fill("A text")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".prediction")).to_have_text("negative")
