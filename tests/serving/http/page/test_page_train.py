"""Claims about training from the page, in a real browser: the file, the run as it goes, and its end."""

from __future__ import annotations

import copy

from serving.http.page.browsing import BROWSER, DRAWN, expect, upload

pytestmark = BROWSER


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


def look(page):
    """Let the page look at the server, as it does every ten seconds."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def list_one(page, trouble, reviews):
    """Begin a run, which stops after two steps, and go to the list of runs."""
    trouble.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-body")).to_contain_text("step 2 of 6")
    page.get_by_role("link", name="All runs").click()


def test_the_list_of_runs_is_looked_at_again_and_again(page, trouble, reviews):
    list_one(page, trouble, reviews)
    expect(page.locator("#runs .badge")).to_have_text("running")
    trouble.runs["run1"]["state"] = "done"
    look(page)
    expect(page.locator("#runs .badge")).to_have_text("done")


def test_a_look_at_the_runs_leaves_the_reader_where_he_is(page, trouble, reviews):
    list_one(page, trouble, reviews)
    link = page.locator("#runs a")
    link.focus()
    trouble.runs["run1"]["state"] = "done"
    look(page)
    expect(page.locator("#runs .badge")).to_have_text("done")
    expect(link).to_be_focused()


def test_what_was_refused_is_told_until_the_reader_goes_on(page, reviews, complaints):
    complaints.append("422")
    upload(page, reviews)
    told = {"error": {"code": "bad_request", "message": "epochs is 0."}}
    page.route("**/v1/tasks/*/train?**", lambda route: route.fulfill(status=422, json=told))
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#trouble")).to_have_text("epochs is 0.")
    with page.expect_response("**/v1/runs"):
        look(page)
    page.evaluate(DRAWN)
    expect(page.locator("#trouble")).to_be_visible()
    page.get_by_role("link", name="Tasks").first.click()
    expect(page.locator("#trouble")).to_be_hidden()


def test_trouble_of_a_look_is_over_with_the_next_that_is_answered(page, trouble, url, complaints):
    complaints.append("503")
    page.goto(f"{url}/#train")
    expect(page.locator("#runs")).to_contain_text("No runs yet.")
    trouble.refuse = [(503, "not_ready", {})] * 9
    look(page)
    expect(page.locator("#trouble")).to_have_text("Refused with not_ready.")
    trouble.refuse = []
    look(page)
    expect(page.locator("#trouble")).to_be_hidden()


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
