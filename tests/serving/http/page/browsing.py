"""What tests of the page share: a patient browser, forms that are filled in, and what was sent."""

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
"""The marks of what needs one."""
PATIENCE = 120_000
"""Milliseconds after which what takes a moment has failed, however busy the machine is."""
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Waits until the page has heard of what happened, and shows it."""
expect = playwright.expect
expect.set_options(timeout=PATIENCE)


def sent(trouble):
    """Give the bodies that were posted, as values."""
    return [json.loads(body) for method, _, body in trouble.asked if method == "POST"]


def upload(page, file):
    """Choose a file to train on."""
    page.get_by_role("link", name="Train", exact=True).click()
    page.locator("#train-file").set_input_files(str(file))
    expect(page.get_by_label("Label column")).to_be_visible()  # it has been read


def contrast(one, other):
    """Give the ratio of two colours' lightness, as WCAG counts it."""

    def light(colour):
        linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05

    return max(light(one), light(other)) / min(light(one), light(other))
