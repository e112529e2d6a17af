"""Promise: requests generated from the OpenAPI document, and against it, are answered as it says."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from adapterbank.serving.http.app import create_app
from adapterbank.serving.http.routes_train import TYPES
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.storage.bank import Bank
from serving.dummy import Dummy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own imports warn of one another
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance


class Idle(JobQueue):
    """Takes runs, and lets them wait."""

    async def start(self):
        """Begin none."""

    async def stop(self):
        """End none."""


folder = tempfile.TemporaryDirectory()  # lives as long as this module: cases are drawn when tests are collected
bank = Bank.open(Path(folder.name, "bank"), {"name": "tiny", "sha256": "a" * 64}, create=True)
schemathesis.serializer.alias([*TYPES], "application/octet-stream")  # data files are bytes to it
app = create_app(Dummy(["length", "other"]), jobs=Idle(bank.path, threads=1), page=False)
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_generated_requests_are_answered_as_the_document_says(case):
    # That there are as many pairs as texts is more than a schema can say, or that an option is of one method only.
    case.call_and_validate(excluded_checks=[positive_data_acceptance])
