"""Claims about the page's routes: only the page's own files, with headers that isolate it from other sites."""

from __future__ import annotations

import hashlib
import re

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")

from importlib import resources

from fastapi import FastAPI
from fastapi.testclient import TestClient

from adapterbank.serving.http.routes_page import page_router

FILES = {file.name: file.read_bytes() for file in (resources.files("adapterbank.serving.http") / "page").iterdir()}
INDEX = FILES["index.html"].decode()


@pytest.fixture(scope="module")
def http():
    app = FastAPI()
    app.include_router(page_router())
    with TestClient(app) as client:
        yield client


def test_every_file_is_served_with_its_kind(http):
    kinds = {
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
        "html": "text/html",
        "txt": "text/plain",
    }
    for name, body in FILES.items():
        found = http.get("/" if name == "index.html" else f"/page/{name}")
        assert found.content == body
        assert found.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../routes_page.py", "/page/%2e%2e/routes_page.py"])
def test_nothing_else_is_served(http, path):
    assert http.get(path).status_code == 404


def test_every_file_may_fetch_from_its_own_server_only_and_run_no_inline_script(http):
    for path in ("/", "/page/page.js", "/page/page.css", "/page/icon.svg"):
        headers = http.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
        assert {policy[kind] for kind in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
        assert headers["x-content-type-options"] == "nosniff"


def test_a_cached_file_is_not_sent_again(http):
    tag = http.get("/page/page.js").headers["etag"]
    again = http.get("/page/page.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert http.head("/").status_code == 200


def test_the_pages_routes_are_not_in_the_openapi_document(http):
    assert http.get("/openapi.json").json()["paths"] == {}


def test_the_files_name_no_other_server_and_put_nothing_in_as_markup():
    for name, body in FILES.items():
        if name.startswith("uplot"):
            continue
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|(?:src|href)=\"//", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", INDEX)


def test_the_chart_library_is_that_of_the_registry_with_its_licence():
    """uPlot 1.6.32 from npm: dist/uPlot.iife.min.js, dist/uPlot.min.css and LICENSE, unchanged."""
    digests = {name: hashlib.sha256(body).hexdigest()[:12] for name, body in FILES.items() if name.startswith("uplot")}
    assert digests == {"uplot.js": "19c8d4c6ad88", "uplot.css": "df630c6a8d6f", "uplot-license.txt": "8f989229699b"}
    assert b"uPlot (v1.6.32)" in FILES["uplot.js"]
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", FILES["uplot.js"])
    assert FILES["uplot-license.txt"].startswith(b"The MIT License")


def test_every_field_of_a_form_has_a_label():
    for tag in re.findall(r"<(?:input|select|textarea)[^>]*>", INDEX):
        before = INDEX[: INDEX.index(tag)]
        assert before.rfind("<label") > before.rfind("</label>"), tag
