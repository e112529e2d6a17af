"""Claims about error messages: enough to act on, without the server's folders or a user's text."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapterbank.errors import PackageDamaged
from adapterbank.serving.http.telemetry import JsonLines
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.requests import to_refusal, without_paths
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
