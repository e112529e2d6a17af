"""Find the browser for the tests of the page: ADAPTERBANK_CHROMIUM, the PATH, or where playwright installs it."""

from __future__ import annotations

import functools
import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "no Chromium found: install one, run 'playwright install chromium', or set ADAPTERBANK_CHROMIUM to its path"


@functools.cache
def find_chromium() -> str | None:
    """Return the path of a Chromium, or None if there is none."""
    if chosen := os.environ.get("ADAPTERBANK_CHROMIUM"):
        return chosen if os.path.exists(chosen) else None
    return next((path for name in NAMES if (path := shutil.which(name))), None) or _of_playwright()


def _of_playwright() -> str | None:
    """Return the browser that `playwright install chromium` downloads; only playwright knows its folder."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as tools:
        path = tools.chromium.executable_path
    return path if os.path.exists(path) else None
