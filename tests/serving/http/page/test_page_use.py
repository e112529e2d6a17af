"""Promise: the page is usable in a real browser: with a key, by keyboard alone, in light and dark."""

from __future__ import annotations

import re

import pytest

from adapterbank.serving.http.auth import Keys
from serving.http.page.browsing import BROWSER, DRAWN, contrast, expect, upload

pytestmark = BROWSER


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_an_ablation_is_shown_as_a_table_with_readable_values(page, url, theme):
    page.emulate_media(color_scheme=theme)
    page.evaluate(DRAWN)  # the page draws again for it, which must happen before the checks below
    page.goto(f"{url}/#task/task-00")
    table = page.locator(".heat")
    expect(table.locator("tbody tr")).to_have_count(6)
    expect(table.locator("tbody tr").first.locator("td").last).to_have_text("-30.0")
    expect(table.locator("tbody td:not(:empty)")).to_have_count(21)
    colours = "(cell) => [getComputedStyle(cell).color, getComputedStyle(cell).backgroundColor]"
    for cell in table.locator("tbody td:not(:empty)").all():
        ink, ground = (tuple(map(int, re.findall(r"\d+", one)))[:3] for one in cell.evaluate(colours))
        assert contrast(ink, ground) >= 4.5


class TestKeys:
    @pytest.fixture
    def keys(self, tmp_path):
        return Keys(tmp_path / "keys.json")

    @pytest.fixture
    def secret(self, keys):
        return keys.add("admin", ["admin"])

    def test_the_page_prompts_for_a_key_and_keeps_it_for_the_tab(self, page, secret, complaints, reviews):
        complaints.append("401")
        expect(page.get_by_role("dialog")).to_contain_text("Only people with a key may use this server")
        expect(page.get_by_label("API key")).to_have_attribute("autocomplete", "current-password")
        expect(page.get_by_label("API key")).to_have_attribute("type", "password")
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("This key is not valid here")
        expect(page.get_by_role("dialog")).not_to_contain_text("Bearer")
        expect(page.get_by_label("API key")).to_have_value("")
        page.get_by_label("API key").fill(secret)
        page.keyboard.press("Enter")
        expect(page.locator("#tasks-list .task")).to_have_count(50)
        assert page.evaluate("[Object.values(sessionStorage), Object.keys(localStorage), document.cookie]") == [
            [secret],
            [],
            "",
        ]
        page.reload()
        expect(page.locator("#tasks-list .task")).to_have_count(50)
        upload(page, reviews)
        page.get_by_role("button", name="Train", exact=True).click()
        expect(page.locator("#run-title .badge")).to_have_text("done")
        page.get_by_role("button", name="Forget the key").click()
        expect(page.get_by_role("dialog")).to_be_visible()

    def test_without_a_key_the_page_says_how_to_sign_in(self, page, complaints):
        complaints.append("401")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#trouble")).to_have_text("You are not signed in. Reload the page to enter an API key.")


def test_the_curl_example_sends_a_key_if_one_is_in_use(page, url):
    page.goto(f"{url}/#task/task-00")
    expect(page.locator("#task-body pre")).to_contain_text("curl")
    expect(page.locator("#task-body pre")).not_to_contain_text("Authorization")
    page.evaluate("sessionStorage.setItem('adapterbank-key', 'abk_1')")
    page.reload()
    expect(page.locator("#task-body pre")).to_contain_text("-H 'Authorization: Bearer KEY' \\")
    expect(page.locator("#task-body pre")).not_to_contain_text("abk_1")


def test_the_page_works_with_the_keyboard_alone(page):
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Try", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Try", exact=True)).to_have_attribute("aria-current", "page")
    expect(page.locator("#main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#try-task")).to_be_focused()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast_in_light_and_dark(page, theme):
    page.emulate_media(color_scheme=theme)
    names = ("paper", "card", "ink", "quiet", "accent", "on-accent", "bad", "bad-soft", "good", "track", "soft")
    script = "(names) => names.map((one) => getComputedStyle(document.body).getPropertyValue(`--${one}`).trim())"
    found = dict(zip(names, page.evaluate(script, list(names)), strict=True))
    colour = {name: tuple(int(value[i : i + 2], 16) for i in (1, 3, 5)) for name, value in found.items()}
    grounds = {
        **{"ink": "paper card track", "quiet": "paper card", "accent": "card paper soft"},
        **{"on-accent": "accent", "bad": "bad-soft", "good": "track"},
    }
    pairs = [(one, other) for one, others in grounds.items() for other in others.split()]
    for one, other in pairs:
        assert contrast(colour[one], colour[other]) >= 4.5, (one, other)
