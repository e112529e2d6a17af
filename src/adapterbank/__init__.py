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
    from adapterbank.api import OpenBank, load_backbone, open_bank
    from adapterbank.client.client import AsyncClient, Client
    from adapterbank.errors import AdapterbankError
    from adapterbank.inference.predictions import Prediction

_HOMES = {
    "AdapterbankError": "adapterbank.errors",
    "AsyncClient": "adapterbank.client.client",
    "Client": "adapterbank.client.client",
    "OpenBank": "adapterbank.api",
    "Prediction": "adapterbank.inference.predictions",
    "load_backbone": "adapterbank.api",
    "open_bank": "adapterbank.api",
}

__all__ = [
    "AdapterbankError",
    "AsyncClient",
    "Client",
    "OpenBank",
    "Prediction",
    "__version__",
    "load_backbone",
    "open_bank",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it, when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'adapterbank' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
