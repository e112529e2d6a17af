"""Promise: the page trains, in a real browser: the file, the run in progress, and its end."""

from __future__ import annotations

from adapterbank.config import Config, resolve
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
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#run-title")).to_have_text("my-reviews done")
    (sent,) = [body for method, path, body in faults.requests if path == "/v1/tasks/my-reviews/train"]
    assert sent == reviews.read_bytes()
    assert jobs.list()[0].options == {"epochs": 2, "text": "review, as written", "label": "stars"}
    assert jobs.list()[0].data["format"] == "csv"


def test_the_curves_of_a_run_grow_while_it_trains(page, jobs, reviews):
    jobs.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#run-title .badge")).to_have_text("running")
    expect(page.locator("#run-body")).to_contain_text("step 2 of 6")
    expect(page.locator(".curve.score")).to_contain_text("After the first epoch.")
    jobs.steps = 3
    expect(page.locator(".curve.score .plot")).to_have_attribute("aria-label", "Score on dev by epoch: 0.7000")
    kept = page.locator(".curve.score canvas").element_handle()
    jobs.steps = 6
    expect(page.locator("#run-title .badge")).to_have_text("done")
    expect(page.locator(".curve.loss .plot")).to_have_attribute(
        "aria-label", "Loss on the training data by epoch: 0.6000, 0.3000"
    )
    assert kept.is_visible()  # the same drawing has grown, so that what is under the pointer stays
    expect(page.get_by_role("status").filter(has_text="Version 1 of my-reviews is served")).to_contain_text(
        "accuracy 0.8000 on 120 dev rows"
    )
    page.get_by_role("link", name="All runs").click()
    expect(page.locator("#runs li")).to_contain_text("best on dev 0.8000")


def test_a_curve_has_ticks_a_label_for_every_line_and_the_values_under_the_pointer(page, reviews):
    upload(page, reviews)
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#run-title .badge")).to_have_text("done")
    chart = page.locator(".curve.score")
    expect(chart.locator(".u-legend .u-series:visible .u-label")).to_have_text(["epoch", "each epoch"])
    expect(chart.locator(".u-legend .u-series:visible .u-value")).to_have_text(["2", "0.8000"])  # the last
    box = chart.locator(".u-over").bounding_box()
    chart.locator(".u-over").hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    expect(chart.locator(".u-legend .u-series:visible .u-value")).to_have_text(["1", "0.7000"])
    drawn = (
        "(canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((x) => x > 0)"
    )
    assert chart.locator("canvas").evaluate(drawn)


def test_fields_have_the_defaults_and_limits_of_the_shell_and_only_what_is_chosen_is_sent(page, jobs, reviews):
    upload(page, reviews)
    shell = resolve(Config())
    page.get_by_text("More options").click()
    names = {"Adapter size": "size", "Epochs": "epochs", "Learning rate": "lr", "Batch size": "batch", "Seed": "seed"}
    for label, name in {**names, "Maximum length in tokens": "max_length"}.items():
        field, option = page.get_by_label(label), Config.__dataclass_fields__[name]
        expect(field).to_have_attribute("placeholder", f"{getattr(shell, name):g} (default)")
        expect(field).to_have_attribute("max", f"{option.metadata['high']}")
        expect(field).to_have_attribute("title", option.metadata["help"])
        expect(field).to_have_value("")
    expect(page.get_by_label("Class weights").locator("option")).to_have_text(["none", "balanced"])
    expect(page.get_by_label("Long texts").locator("option")).to_have_text(["auto", "cut", "windows"])
    page.get_by_label("Class weights").select_option("balanced")
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#run-title .badge")).to_have_text("done")
    assert jobs.list()[0].options == {"class_weights": "balanced", "text": "id", "label": "stars"}


def test_dev_and_test_files_are_sent_after_the_training_file(page, faults, jobs, reviews, tmp_path):
    upload(page, reviews)
    for name, label in (("dev", "Dev file"), ("test", "Test file")):
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{name},1\n")
        page.get_by_label(label).set_input_files(str(tmp_path / f"{name}.csv"))
    expect(page.locator("#train-hint")).to_contain_text("test.csv")
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#run-title .badge")).to_have_text("done")
    (sent,) = [body for method, path, body in faults.requests if path == "/v1/tasks/my-reviews/train"]
    assert sent == reviews.read_bytes() + b"text,label\ndev,1\n" + b"text,label\ntest,1\n"
    assert {name: jobs.list()[0].data[name] for name in ("dev", "test")} == {"dev": 17, "test": 18}


def test_files_of_two_formats_are_refused_before_anything_is_sent(page, faults, reviews, tmp_path):
    upload(page, reviews)
    (tmp_path / "dev.jsonl").write_text("{}")
    page.get_by_label("Dev file").set_input_files(str(tmp_path / "dev.jsonl"))
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.locator("#trouble")).to_have_text(
        "The dev file is jsonl, but the training file is csv; choose files of one format."
    )
    assert not [path for method, path, _ in faults.requests if method == "POST"]


def refresh(page):
    """Let the page refresh, as it does every ten seconds."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def list_one(page, jobs, reviews):
    """Start a run, which pauses after two steps, and open the list of runs."""
    jobs.steps = 2
    upload(page, reviews)
    page.get_by_role("button", name="Train", exact=True).click()
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
    page.get_by_role("button", name="Train", exact=True).click()
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
    page.get_by_role("button", name="Train", exact=True).click()
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
    page.get_by_role("button", name="Train", exact=True).click()
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
