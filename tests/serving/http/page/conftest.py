"""A page in a real browser over a stand-in server, at two widths."""

from __future__ import annotations

import re

import pytest


@pytest.fixture(scope="module")
def browser():
    """Give a browser; for a module only, as it keeps an event loop that others would run into."""
    from serving.http.page.browsing import CHROMIUM, PATIENCE, playwright

    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        yield found
        found.close()


@pytest.fixture
def trouble():
    """Give what goes wrong, and what was asked."""
    from stand_in import Trouble

    return Trouble()


@pytest.fixture
def bank():
    """Give the tasks and the problems of the bank; tests may have their own."""
    from stand_in import many

    return many(), []


@pytest.fixture
def url(bank, trouble):
    """Give the address of the stand-in."""
    from adapterbank.serving.http.routes_page import page_router
    from stand_in import make, served

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
    """Give the width of the screen."""
    return request.param


@pytest.fixture
def page(browser, url, complaints, width):
    """Give a page that fails its test when it logs an error, asks another server or is wider than its screen."""
    from serving.http.page.browsing import PATIENCE

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


@pytest.fixture
def reviews(tmp_path):
    """Give a file of reviews."""
    file = tmp_path / "my reviews.csv"
    file.write_text(
        'id,"review, as written",stars\n1,"Warm, and ""funny"".",5\n2,"Dull\nand long.",1\n', encoding="utf-8"
    )
    return file
