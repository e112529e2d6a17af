"""The OpenAPI document is true: requests drawn from it, and against it, are answered as it says."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import HealthCheck, settings

from adapterbank.serving.app import create_app
from serving.dummy import Dummy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own imports warn of one another
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance

schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(Dummy(["length", "other"]), page=False))


@schema.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_what_is_drawn_from_the_document_is_answered_as_it_says(case):
    # That there are as many pairs as texts is more than a schema can say.
    case.call_and_validate(excluded_checks=[positive_data_acceptance])
