"""Claims about error messages: enough to act on, without the server's folders or a user's text."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapterbank.errors import PackageDamaged
from adapterbank.inference.explain import explained
from adapterbank.serving.http.telemetry import JsonLines
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.requests import to_refusal, without_paths
from adapterbank.tasks.spec import Examples
from serving.small_bank import running


@pytest.mark.parametrize(
    ("message", "bank", "shown"),
    [
        ("/srv/bank/tasks/a/1 is missing; restore it.", "/srv/bank", "tasks/a/1 is missing; restore it."),
        ("/srv/bank cannot be used: it is full.", "/srv/bank", "the bank cannot be used: it is full."),
        ("bank/tasks/a/1 is not in the bank.", "bank", "tasks/a/1 is not in the bank."),
        ("tasks/a/1 is missing.", ".", "tasks/a/1 is missing."),
        ("No task 'b'. See: adapterbank tasks --bank /srv/bank", "/srv/bank", "No task 'b'. See: GET /v1/tasks"),
    ],
)
def test_messages_have_paths_relative_to_the_bank(message, bank, shown):
    assert without_paths(message, Path(bank)) == shown


def test_an_unexpected_error_is_logged_without_its_message():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("adapterbank.serving")
    logger.addHandler(handler)
    try:
        try:
            raise ValueError("cannot read 'a secret'")
        except ValueError as error:
            found = to_refusal(error, SimpleNamespace(request="r-17"), Path("bank"))
    finally:
        logger.removeHandler(handler)
    assert (found.code, "secret" in str(found)) == ("internal", False)
    assert "ValueError" in stream.getvalue()
    assert '"request_id": "r-17"' in stream.getvalue()
    assert "secret" not in stream.getvalue()


@pytest.mark.parametrize(("exists", "code"), [(True, "damaged"), (False, "unknown_task"), (PermissionError, "damaged")])
def test_a_package_whose_folder_cannot_be_read_is_damaged_not_removed(exists, code):
    def look():
        if exists is PermissionError:
            raise PermissionError(13, "Permission denied")
        return exists

    path, handle = SimpleNamespace(exists=look), SimpleNamespace(removed=False)
    pending = SimpleNamespace(served=SimpleNamespace(handle=handle, package=SimpleNamespace(path=path)))
    assert to_refusal(PackageDamaged("a@1 cannot be read; restore it."), pending, Path("bank")).code == code


def test_no_response_contains_the_location_of_the_bank_or_the_encoder(small, tmp_path):
    small.put("whole")
    (small.put("broken").path / "weights.safetensors").write_bytes(b"nothing")

    async def run():
        async with running(small) as service:
            with pytest.raises(Refusal) as refused:
                await service.predict([Ask("broken", ["a"])])
            return await service.tasks(), await service.task("whole"), refused.value.message

    tasks, whole, message = asyncio.run(run())
    assert tasks["problems"][0]["message"] == message
    assert message.startswith("tasks/broken/1/weights.safetensors has been changed: it has ")
    assert str(tmp_path) not in f"{tasks}{whole}"
    assert "/" not in tasks["backbone"]["name"] + whole["backbone"]["name"]


def ask_service(small, *asks):
    async def run():
        async with running(small) as service:
            found = await service.predict(asks)
            return found, service.numbers()["rows"]

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
def test_an_explanation_is_that_of_the_engine_and_its_words_count_as_rows(small, kind):
    small.put("a", kind=kind)
    small.put("b", pair=True)
    texts = ["the big dog sat", "why"]
    (first, second), rows = ask_service(
        small, Ask("a", texts, explain=99), Ask("b", ["the cat"], ["a dog"], explain=99)
    )
    assert (first.rows, second.rows, rows) == (4 + 1 + 1 + 1, 2 + 2 + 1, 12)
    (wanted,) = explained(small.alone("a").predict, [("a", Examples(texts))])
    assert len(first.predictions) == 2
    for found, one in zip(first.predictions, wanted, strict=True):
        told, expected = found.pop("explanation"), one.explanation
        assert [word["word"] for word in told["words"]] == [word["word"] for word in expected["words"]]
        shares, others = ([word["share"] for word in side["words"]] for side in (told, expected))
        assert shares == pytest.approx(others, abs=3e-6)
    assert [one["in"] for one in second.predictions[0]["explanation"]["words"]] == ["text", "text", "pair", "pair"]


@pytest.mark.parametrize(
    ("ask", "code", "message"),
    [
        (Ask("a", ["one two three", "four"], explain=5), "too_many_texts", "takes 6 rows"),
        (Ask("a", ["x" * 50_000 + " y" * 127], explain=256), "text_too_long", "shorten them"),
        (Ask("where", ["who"], ["a dog"], explain=9), "bad_request", "neither probabilities nor a value"),
    ],
)
def test_explanations_that_take_too_much_are_refused_before_anything_is_computed(small, ask, code, message):
    small.put("a")
    small.put("where", kind="span")
    with pytest.raises(Refusal, match=message) as refused:
        ask_service(small, ask)
    assert refused.value.code == code


def test_one_text_is_always_explained_as_far_as_the_limit_allows(small):
    small.put("a")
    ((found,), rows) = ask_service(small, Ask("a", ["the cat sat on the mat"], explain=4))
    assert (rows, found.predictions[0]["explanation"]["left_out"]) == (4, 3)
    assert len(found.predictions[0]["explanation"]["words"]) == 3
