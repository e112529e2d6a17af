"""Promise: the page /docs sends a request in a real browser and shows the answer, with a key where one is needed."""

from __future__ import annotations

import pytest

from adapterbank.serving.http.auth import Keys
from serving.http.page.browsing import BROWSER, expect
from serving.sample_server import MARKUP

pytestmark = BROWSER


def open_form(page, path):
    form = page.locator(f'form[data-path="{path}"]')
    page.locator("section", has=form).locator("summary", has_text="Try it").click()
    return form


def test_a_call_is_sent_as_entered_and_its_answer_is_shown(page, url, complaints):
    complaints.append("404")
    page.goto(f"{url}/docs")
    form = open_form(page, "/v1/tasks/{task}/predict")
    form.get_by_label("task").fill("markup")
    form.get_by_label("body").fill('{"text": "Dull."}')
    form.get_by_role("button", name="Send").click()
    expect(form.locator("output")).to_contain_text("200 OK")
    expect(form.locator("output")).to_contain_text(MARKUP.replace('"', '\\"'))
    assert page.locator("output img").count() == 0
    form.get_by_label("task").fill("no/such")
    form.get_by_role("button", name="Send").click()
    expect(form.locator("output")).to_contain_text('"code": "not_found"')


class TestWithKeys:
    @pytest.fixture
    def keys(self, tmp_path):
        return Keys(tmp_path / "keys.json")

    @pytest.fixture
    def secret(self, keys):
        return keys.add("admin", ["admin"])

    def test_the_key_is_asked_for_and_sent(self, secret, page, url, complaints):
        complaints.append("401")
        page.goto(f"{url}/docs")
        assert page.locator("section").count() == 0
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator("output")).to_have_text("This server does not know the key.")
        page.get_by_label("API key").fill(secret)
        page.get_by_role("button", name="Use this key").click()
        form = page.locator('form[data-path="/v1/tasks"]')
        expect(form).to_have_count(1)
        form = open_form(page, "/v1/tasks")
        form.get_by_role("button", name="Send").click()
        expect(form.locator("output")).to_contain_text("200 OK")
