"""The page in a real browser over the real app with sample tasks and scripted runs, at two widths."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def browser():
    """Start a browser; for one module only, because its event loop would disturb other tests."""
    from serving.http.page.browsing import CHROMIUM, PATIENCE, playwright

    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield found
        found.close()


@pytest.fixture
def faults():
    """What goes wrong, and what was requested."""
    from serving.sample_server import Faults

    return Faults()


@pytest.fixture
def service():
    """The tasks and problems of the bank; a test may have its own."""
    from serving.sample_server import SampleService, sample_tasks

    return SampleService(sample_tasks())


@pytest.fixture
def jobs(tmp_path):
    """The queue of training runs."""
    from serving.sample_server import ScriptedJobs

    return ScriptedJobs(tmp_path / "bank")


@pytest.fixture
def keys():
    """The API keys; none unless a test has some."""


@pytest.fixture
def url(service, jobs, keys, faults):
    """Serve the app; the address."""
    from serving.sample_server import make_app, served

    with served(make_app(service, faults, jobs=jobs, keys=keys)) as address:
        yield address


@pytest.fixture
def complaints():
    """Patterns of console messages that are expected; any other fails the test."""
    return []


@pytest.fixture(params=[360, 1280], ids=["phone", "desktop"])
def width(request):
    """The width of the screen."""
    return request.param


@pytest.fixture
def page(browser, url, complaints, width):
    """Open the page; fail if it logs an error, calls another server or is wider than the screen."""
    from serving.http.page.browsing import PATIENCE

    context = browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(PATIENCE)
    # The page refreshes every ten seconds; here only when a test says so, because a slow test would see more refreshes.
    context.add_init_script("window.setInterval = (work) => { window.look = work; };")
    page = context.new_page()
    errors, requested = [], []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.goto(url)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert [one for one in errors if not any(re.search(known, one) for known in complaints)] == []
    assert [one for one in requested if not one.startswith((f"{url}/", "data:"))] == []
    assert page.title() != "taken"
    context.close()


@pytest.fixture
def reviews(tmp_path):
    """A file of reviews."""
    file = tmp_path / "my reviews.csv"
    file.write_text(
        'id,"review, as written",stars\n1,"Warm, and ""funny"".",5\n2,"Dull\nand long.",1\n', encoding="utf-8"
    )
    return file
