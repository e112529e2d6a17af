"""Promise: all parts work together: page and client over the real app, engine and training, on a tiny encoder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")

import adapterbank
from adapterbank.errors import ServiceError, TrainingError
from adapterbank.inference.engine import Engine
from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.service.service import BankService
from adapterbank.storage.bank import Bank
from chromium import MISSING, find_chromium
from serving.sample_server import served
from serving.training import FAST, new_bank
from small_data import NOUNS, answers, pairs, reviews, write

ROOT = Path(__file__).parents[2]
CHROMIUM = find_chromium()
PATIENCE = 600_000
"""Milliseconds to wait for a run, which has the lowest priority on the machine."""


@pytest.fixture
def bank(tmp_path, bert):
    return new_bank(tmp_path / "bank", bert)


@pytest.fixture
def serve(bank, bert):
    """A function that serves the bank, with or without keys."""

    def start(keys=None):
        service = BankService(Bank.open(bank), Engine(bert, device="cpu"))
        return served(create_app(service, jobs=JobQueue(bank, device="cpu", threads=1), keys=keys))

    return start


@pytest.fixture
def csv(tmp_path):
    return write(tmp_path / "reviews.csv", reviews())


def test_the_client_trains_a_task_and_uses_it(serve, csv, tmp_path, bank, bert):
    with serve() as url, adapterbank.Client(url, timeout=600) as client:
        assert client.health()
        seen = []
        run = client.wait(client.train("sentiment", csv, **FAST), seen.append)
        assert (run.state, run.version, len(run.history)) == ("done", 1, 2)
        assert len(seen) > 1
        events = list(client.events(run.id))
        assert [event.data["epoch"] for event in events if "score" in event.data] == [1, 2]
        assert events[-1].data["state"] == "done"
        assert client.ready()
        texts = [text for text, _ in reviews(5)]
        expected = adapterbank.open_bank(bank, bert, device="cpu").predict("sentiment", texts)
        found = client.predict("sentiment", texts)
        assert [one.label for one in found] == [one.label for one in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
        cut, whole = client.predict("sentiment", ["the cat was good " * 20, "the cat was good"])
        assert (cut.truncated, whole.truncated) == (True, None)
        listed = client.tasks()
        assert [(task.name, task.version, task.labels) for task in listed] == [
            ("sentiment", 1, ("negative", "positive"))
        ]
        assert client.predict_rows([{"task": "sentiment@1", "text": texts[0]}])[0] == found[0]
        second = client.wait(client.train("sentiment", write(tmp_path / "more.jsonl", reviews(16)), **FAST))
        assert second.version == 2
        assert client.task("sentiment")["versions"] == [1, 2]
        client.rollback("sentiment")
        assert client.predict("sentiment", texts)[0].version == 1
        client.remove("sentiment")
        with pytest.raises(ServiceError) as caught:
            client.predict("sentiment", texts)
        assert caught.value.code == "unknown_task"


def test_the_client_trains_tagging_from_conll_and_tags_texts_and_words(serve, tmp_path, bank, bert):
    words = ["the", "red", "fox", "was", "good"]
    lines = [[f"{word}\t{'B-thing' if word == noun else 'O'}" for word in ["the", noun, "ran"]] for noun in NOUNS * 4]
    file = tmp_path / "train.conll"
    file.write_text("\n\t\n".join("\n".join(one) for one in lines))
    with serve() as url, adapterbank.Client(url, timeout=600) as client:
        run = client.wait(client.train("things", file, dev=file, **{**FAST, "epochs": 8}))
        assert run.metrics["dev"]["tag_f1"] > 0.5
        assert run.metrics["dev"]["rows"] == len(lines)
        plain, listed = client.predict("things", [" ".join(words), words])
        expected = adapterbank.open_bank(bank, bert, device="cpu").predict("things", [words])[0]
        assert plain.entities == listed.entities
        assert list(listed.tags) == expected.tags
        assert [one["text"] for one in listed.entities] == [one["text"] for one in expected.entities]
        assert list(vars(client.predict("things", ["[red fox]"])[0])["other"]) == ["entities"]


def test_the_client_reports_the_servers_messages(serve, csv, bank):
    keys = Keys(bank / "keys.json")
    key = keys.add("reader", ["predict"])
    with serve(keys) as url:
        with adapterbank.Client(url) as client, pytest.raises(ServiceError) as caught:
            client.tasks()
        assert caught.value.code == "unauthorized"
        with adapterbank.Client(url, key) as client:
            assert len(client.tasks()) == 0
            with pytest.raises(ServiceError, match="train") as caught:
                client.train("sentiment", csv)
            assert caught.value.code == "forbidden"
        with adapterbank.Client(url, keys.add("boss", ["admin"])) as client:
            with pytest.raises(ServiceError, match="colour"):
                client.train("sentiment", csv, colour="red")
            with pytest.raises(TrainingError, match="no column"):
                client.wait(client.train("sentiment", csv, label="nothing"))


def commands():
    """Return the lines of the docs that call curl."""
    text = (ROOT / "docs" / "serving-curl.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("curl ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_every_curl_command_of_the_docs_works_in_order(serve, bank, bert, csv):
    opened = adapterbank.open_bank(bank, bert, device="cpu")
    for name, rows in {"sentiment": reviews(), "topic": reviews(), "glue-mrpc": pairs(), "squad-v1": answers()}.items():
        opened.train(name, rows, **FAST)
    with serve() as url, adapterbank.Client(url) as client:
        id = ""
        for line in commands():
            words = shlex.split(line.replace("http://127.0.0.1:8000", url).replace("/ID", f"/{id}"))
            if "--data-binary" in words:
                words[-1] += "&lr=0.01&batch=8&max_length=32"  # the tiny encoder takes no longer texts
            strictly = ["--silent", "--show-error", *([] if "--fail" in words else ["--fail-with-body"])]
            done = subprocess.run([*words, *strictly], cwd=csv.parent, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, line + done.stdout + done.stderr
            if "--data-binary" in words:
                id = json.loads(done.stdout)["id"]
                assert client.wait(id).version == 2
        assert len(commands()) >= 18
        assert len(client.tasks()) == 3


def test_the_docs_have_a_curl_command_for_every_route(serve):
    asked = {re.sub(r"'?http://127.0.0.1:8000|\?.*", "", word) for line in commands() for word in line.split()
             if "http://" in word}  # fmt: skip
    asked = {re.sub(r"/runs/ID", "/runs/{id}", re.sub(r"tasks/[\w@-]+", "tasks/{task}", path)) for path in asked}
    with serve() as url, urllib.request.urlopen(f"{url}/openapi.json") as answer:
        assert set(json.load(answer)["paths"]) - asked == set()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_page_trains_a_task_and_uses_it(serve, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    expect = playwright.expect
    expect.set_options(timeout=PATIENCE)
    csv = write(tmp_path / "doubles.csv", pairs(), ("premise", "hypothesis", "label"))
    with serve() as url, playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE)
        page = browser.new_page(viewport={"width": 360, "height": 740})
        page.set_default_timeout(PATIENCE)
        errors = []
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        expect(page.locator("#tasks-empty")).to_be_visible()
        page.get_by_role("link", name="upload a file").click()
        page.locator("#train-file").set_input_files(str(csv))
        expect(page.locator("#train-pair")).to_have_value("hypothesis")
        page.get_by_text("More options").click()
        for field, value in {"size": "4", "epochs": "2", "length": "32", "lr": "0.01", "batch": "8"}.items():
            page.locator(f"#train-{field}").fill(value)
        page.get_by_role("button", name="Train", exact=True).click()
        expect(page.locator("#run-title .badge")).to_have_text("done")
        expect(page.locator(".curve.score .plot")).to_have_attribute(
            "aria-label", re.compile(r"epoch: [\d.]+, [\d.]+$")
        )
        page.get_by_role("link", name="Try it").click()
        expect(page.locator("#try-task")).to_have_value("doubles")
        page.get_by_role("textbox", name="premise").fill("the big cat was good")
        page.get_by_role("textbox", name="hypothesis").fill("it is a cat")
        page.get_by_label("Show each word's share").check()
        page.get_by_role("button", name="Predict").click()
        expect(page.locator(".prediction")).to_have_text(re.compile("^(yes|no)$"))
        expect(page.locator(".explained")).to_have_text(["the big cat was good", "it is a cat"])
        expect(page.locator(".odds .bar")).to_have_count(2)
        page.get_by_role("link", name="Tasks", exact=True).click()
        expect(page.locator("#tasks-list li")).to_contain_text("doubles")
        page.get_by_role("link", name="doubles").click()
        expect(page.locator("#task-body")).to_contain_text("premise and hypothesis")
        assert errors == []
        browser.close()
