"""Promise: the page trains, in a real browser: the file, the run in progress, and its end."""

from __future__ import annotations

from serving.http.page.browsing import BROWSER, DRAWN, expect, upload

pytestmark = BROWSER


def test_a_files_columns_are_read_in_the_browser_and_sent_with_the_file(page, faults, jobs, reviews):
    upload(page, reviews)
    expect(page.locator("#train-preview thead")).to_have_text("idreview, as writtenstars")
    expect(page.locator("#train-preview tbody tr").first).to_contain_text('Warm, and "funny".')
    expect(page.get_by_label("Label column")).to_have_value("stars")
    expect(page.get_by_label("Task name")).to_have_value("my-reviews")
    page.get_by_label("Text column").select_option("review, as written")
    page.get_by_label("Epochs").fill("2")
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-title")).to_have_text("my-reviews done")
    (sent,) = [body for method, path, body in faults.requests if path == "/v1/tasks/my-reviews/train"]
    assert sent == reviews.read_bytes()
    assert jobs.list()[0].options == {"size": 64, "epochs": 2, "text": "review, as written", "label": "stars"}
    assert jobs.list()[0].data["format"] == "csv"


def test_the_curves_of_a_run_grow_while_it_trains(page, jobs, reviews):
    jobs.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-title .badge")).to_have_text("running")
    expect(page.locator("#run-body")).to_contain_text("step 2 of 6")
    expect(page.locator(".curve.score")).to_contain_text("After the first epoch.")
    jobs.steps = 3
    expect(page.locator(".curve.score svg")).to_have_attribute("aria-label", "Score on dev by epoch: 0.7000")
    jobs.steps = 6
    expect(page.locator("#run-title .badge")).to_have_text("done")
    expect(page.locator(".curve.loss svg")).to_have_attribute(
        "aria-label", "Loss on the training data by epoch: 0.6000, 0.3000"
    )
    expect(page.locator(".curve.score .dot")).to_have_count(2)
    expect(page.get_by_role("status").filter(has_text="Version 1 of my-reviews is served")).to_be_visible()
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("#runs li")).to_contain_text("best on dev 0.8000")


def refresh(page):
    """Let the page refresh, as it does every ten seconds."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def list_one(page, jobs, reviews):
    """Start a run, which pauses after two steps, and open the list of runs."""
    jobs.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-body")).to_contain_text("step 2 of 6")
    page.get_by_role("link", name="All runs").click()


def test_the_list_of_runs_is_refreshed(page, jobs, reviews):
    list_one(page, jobs, reviews)
    expect(page.locator("#runs .badge")).to_have_text("running")
    jobs.runs.end(jobs.list()[0].id, "done", version=1)
    refresh(page)
    expect(page.locator("#runs .badge")).to_have_text("done")


def test_a_refresh_of_the_runs_keeps_the_focus(page, jobs, reviews):
    list_one(page, jobs, reviews)
    link = page.locator("#runs a")
    link.focus()
    jobs.runs.end(jobs.list()[0].id, "done", version=1)
    refresh(page)
    expect(page.locator("#runs .badge")).to_have_text("done")
    expect(link).to_be_focused()


def test_an_error_is_shown_until_the_reader_moves_on(page, reviews, complaints):
    complaints.append("422")
    upload(page, reviews)
    error = {"error": {"code": "bad_request", "message": "epochs is 0."}}
    page.route("**/v1/tasks/*/train?**", lambda route: route.fulfill(status=422, json=error))
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#trouble")).to_have_text("epochs is 0.")
    with page.expect_response("**/v1/runs"):
        refresh(page)
    page.evaluate(DRAWN)
    expect(page.locator("#trouble")).to_be_visible()
    page.get_by_role("link", name="Tasks").first.click()
    expect(page.locator("#trouble")).to_be_hidden()


def test_the_error_of_a_refresh_disappears_with_the_next_success(page, faults, url, complaints):
    complaints.append("503")
    page.goto(f"{url}/#train")
    expect(page.locator("#runs")).to_contain_text("No runs yet.")
    faults.refuse = [(503, "not_ready", {})] * 9
    refresh(page)
    expect(page.locator("#trouble")).to_have_text("Refused with not_ready.")
    faults.refuse = []
    refresh(page)
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_late_response_does_not_show_an_older_state_of_a_run(page, jobs, reviews):
    late = []

    def hold(route):
        if late:
            route.continue_()
        else:
            late.append((route, jobs.list()[0].to_json()))

    jobs.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    expect(page.locator("#run-body")).to_contain_text("step 2 of 6")
    page.route(f"**/v1/runs/{jobs.list()[0].id}", hold)
    jobs.steps = 3
    while not late:
        page.wait_for_timeout(10)
    jobs.steps = 6
    expect(page.locator("#run-title .badge")).to_have_text("done")
    route, before = late.pop()
    with page.expect_event("requestfinished", lambda request: request == route.request):
        route.fulfill(json=before)
    page.evaluate(DRAWN)
    expect(page.locator("#run-title .badge")).to_have_text("done")


def test_a_run_can_be_cancelled(page, faults, jobs, reviews):
    jobs.steps = 1
    upload(page, reviews)
    page.get_by_role("button", name="Train").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator("#run-body")).to_contain_text("The run was cancelled; the bank has not changed.")
    assert ("DELETE", f"/v1/runs/{jobs.list()[0].id}", b"") in faults.requests


def test_a_failed_run_shows_the_reason(page, jobs, reviews):
    list_one(page, jobs, reviews)
    jobs.runs.end(jobs.list()[0].id, "failed", failure="The label column is empty.")
    page.locator("#runs a").click()
    expect(page.get_by_role("alert").filter(has_text="The label column is empty.")).to_be_visible()


def test_a_server_that_does_not_train_is_shown_as_one(page, faults, url, complaints):
    complaints.append("404")
    expect(page.locator("#tasks-list li")).to_have_count(50)
    faults.refuse = [(404, "not_found", {})]
    page.evaluate("location.hash = '#train'")
    expect(page.locator("#trouble")).to_contain_text("not_found")
    faults.refuse = []
    page.route("**/v1/runs", lambda route: route.fulfill(status=404, json={"error": {"code": "not_found"}}))
    page.goto(f"{url}/#tasks")
    page.goto(f"{url}/#train")
    expect(page.locator("#runs")).to_contain_text("This server does not train")
    expect(page.locator("#train-form")).to_be_hidden()
