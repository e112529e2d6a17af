"""Promise: requests generated from the OpenAPI document, and against it, are answered as it says.

ADAPTERBANK_OPENAPI_CASES sets how many requests are generated for each route, with and without keys.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.auth import Keys
from adapterbank.serving.http.routes_train import TYPES
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.serving.service.protocol import Limits
from adapterbank.storage.bank import Bank
from serving.dummy import Dummy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own imports warn of one another
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

CASES = int(os.environ.get("ADAPTERBANK_OPENAPI_CASES", "15"))
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(@[1-9][0-9]{0,8})?")


class Idle(JobQueue):
    """Takes runs, and lets them wait."""

    async def start(self):
        """Begin none."""

    async def stop(self):
        """End none."""


folder = tempfile.TemporaryDirectory()  # lives as long as this module: cases are drawn when tests are collected
bank = Bank.open(Path(folder.name, "bank"), {"name": "tiny", "sha256": "a" * 64}, create=True)
schemathesis.serializer.alias([*TYPES], "application/octet-stream")  # data files are bytes to it
jobs = Idle(bank.path, threads=1)
keys = Keys(Path(folder.name, "keys.json"))
HEADERS = {"Authorization": f"Bearer {keys.add('test', ['admin'])}"}
KNOWN = jobs.runs.add("length", {"epochs": 3}, {"format": "csv"}, None).id
jobs.runs.cancel(KNOWN)  # so that its events end


def schema_of(headers, **options):
    app = create_app(Dummy(["length", "other"]), jobs=jobs, page=False, **options)
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)


unlocked, locked = schema_of({}), schema_of(HEADERS, keys=keys)
DRAWN = settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def make_known(case):
    """Name tasks and runs that exist in two of three requests; generated names never do."""
    given = case.path_parameters or {}
    if NAME.fullmatch(str(given.get("task", ""))):
        given["task"] = ("length", "other", given["task"])[len(given["task"]) % 3]
    if re.fullmatch("[0-9a-f]{16}", str(given.get("id", ""))):
        given["id"] = given["id"] if given["id"].startswith(("0", "f")) else KNOWN
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("rows"), list):
        rows = [row if not isinstance(row, dict) else _row(row) for row in body["rows"]]
        case.body = body | {"rows": rows}
    elif isinstance(body, dict) and all(_is_short(body.get(name)) for name in ("texts", "pairs")):
        count = len(body["texts"])  # that there are as many pairs is more than a schema can say
        case.body = body | {"pairs": (body["pairs"] * count)[:count]}


def _is_short(texts):
    return isinstance(texts, list) and 0 < len(texts) <= Limits().texts and all(isinstance(one, str) for one in texts)


def _row(row):
    return row | ({"task": "length"} if NAME.fullmatch(str(row.get("task", ""))) else {})


def check(case, headers):
    make_known(case)
    response = case.call(headers=headers)
    excluded = []
    if response.status_code == 413:  # a rejection, though not one that the checker expects
        excluded.append(negative_data_rejection)
    beyond = ("does not use it; leave it out", "give one pair per text", "send all files, end to end")
    if any(one in response.text for one in beyond):  # what fits together is more than a schema can say
        excluded.append(positive_data_acceptance)
    assert response.status_code < 500
    case.validate_response(response, excluded_checks=excluded)


@unlocked.parametrize()
@DRAWN
def test_a_server_without_keys_answers_as_the_document_says(case):
    check(case, {})


@locked.parametrize()
@DRAWN
def test_a_server_with_keys_answers_as_the_document_says(case):
    check(case, HEADERS)


@locked.parametrize()
@DRAWN
def test_a_request_without_a_key_is_refused_as_the_document_says(case):
    response = case.call(headers={"Authorization": "Bearer unknown"})
    refused = (401, 404)  # no address has control characters, with or without a key
    assert (response.status_code in refused) != (case.path in ("/healthz", "/readyz"))
    case.validate_response(response)


def test_a_whole_number_may_be_written_with_a_point():
    case = unlocked["/v1/tasks/{task}/predict"]["POST"].Case(
        path_parameters={"task": "length"}, body={"text": "abc", "best": 91.0}, media_type="application/json"
    )
    assert case.call().json()["predictions"] == [{"value": 3.0}]
