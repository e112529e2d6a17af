"""Shared by the tests of the page: the browser, forms, and the requests that were sent."""

from __future__ import annotations

import json

import pytest

from chromium import MISSING, find_chromium

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

CHROMIUM = find_chromium()
BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=MISSING),
]
"""The marks of tests that need a browser."""
PATIENCE = 120_000
"""Milliseconds after which an expectation has failed; long, because the machine may be busy."""
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Waits until the page has drawn what happened."""
expect = playwright.expect
expect.set_options(timeout=PATIENCE)


def posted(faults):
    """Return the JSON bodies that were posted."""
    return [json.loads(body) for method, _, body in faults.requests if method == "POST"]


def upload(page, file):
    """Choose a data file."""
    page.get_by_role("link", name="Train", exact=True).click()
    page.locator("#train-file").set_input_files(str(file))
    expect(page.get_by_label("Label column")).to_be_visible()  # after the file has been read


def contrast(one, other):
    """Return the contrast ratio of two colours as WCAG defines it."""

    def light(colour):
        linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))
