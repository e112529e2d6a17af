"""adapterbank: one frozen Transformer encoder that learns any number of language tasks.

    bank = adapterbank.open_bank("bank", backbone="minilm")
    bank.train("sentiment", "reviews.csv")
    bank.predict("sentiment", ["What a film!"])

Importing does nothing: torch is loaded when a name that needs it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from adapterbank.analysis.figures import draw_all as draw_figures
    from adapterbank.analysis.figures import figure_data
    from adapterbank.analysis.report import page as render_report
    from adapterbank.analysis.run_table import load as load_runs
    from adapterbank.analysis.tables import with_ours as comparison_tables
    from adapterbank.api.estimator import AdapterClassifier
    from adapterbank.api.opened import OpenBank, load_backbone, open_bank
    from adapterbank.client.client import AsyncClient, Client
    from adapterbank.errors import AdapterbankError, ServiceError, TrainingError
    from adapterbank.inference.engine import Engine
    from adapterbank.inference.predictions import Prediction
    from adapterbank.serving.http.app import create_app
    from adapterbank.serving.service.protocol import Ask, Service
    from adapterbank.serving.service.service import BankService
    from adapterbank.storage import records as records
    from adapterbank.storage.bank import Bank
    from adapterbank.storage.records import read_all as read_records
    from adapterbank.studies import selection as selection
    from adapterbank.studies.selection import choose as choose_settings

_HOMES = {
    "AdapterClassifier": "adapterbank.api.estimator",
    "AdapterbankError": "adapterbank.errors",
    "Ask": "adapterbank.serving.service.protocol",
    "AsyncClient": "adapterbank.client.client",
    "Bank": "adapterbank.storage.bank",
    "BankService": "adapterbank.serving.service.service",
    "Client": "adapterbank.client.client",
    "Engine": "adapterbank.inference.engine",
    "OpenBank": "adapterbank.api.opened",
    "Prediction": "adapterbank.inference.predictions",
    "Service": "adapterbank.serving.service.protocol",
    "ServiceError": "adapterbank.errors",
    "TrainingError": "adapterbank.errors",
    "create_app": "adapterbank.serving.http.app",
    "load_backbone": "adapterbank.api.opened",
    "open_bank": "adapterbank.api.opened",
}
_HOMES |= {
    "choose_settings": "adapterbank.studies.selection:choose",
    "comparison_tables": "adapterbank.analysis.tables:with_ours",
    "draw_figures": "adapterbank.analysis.figures:draw_all",
    "figure_data": "adapterbank.analysis.figures",
    "load_runs": "adapterbank.analysis.run_table:load",
    "read_records": "adapterbank.storage.records:read_all",
    "render_report": "adapterbank.analysis.report:page",
}
"""The module of each public name, and after a colon the name that it has there, if that differs."""

_MODULES = {"records": "adapterbank.storage.records", "selection": "adapterbank.studies.selection"}
"""Modules that could be imported from here before they had public functions, and still can."""

__all__ = [
    "AdapterClassifier",
    "AdapterbankError",
    "Ask",
    "AsyncClient",
    "Bank",
    "BankService",
    "Client",
    "Engine",
    "OpenBank",
    "Prediction",
    "Service",
    "ServiceError",
    "TrainingError",
    "__version__",
    "choose_settings",
    "comparison_tables",
    "create_app",
    "draw_figures",
    "figure_data",
    "load_backbone",
    "load_runs",
    "open_bank",
    "read_records",
    "render_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it, when it is first used."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'adapterbank' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
