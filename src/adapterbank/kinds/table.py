"""The table of kinds of task: one row for each. To add a kind, write its file and add its row here."""

from __future__ import annotations

from adapterbank.errors import UnknownName
from adapterbank.kinds.classification import CLASSIFICATION
from adapterbank.kinds.kind import Kind
from adapterbank.kinds.multilabel import MULTILABEL
from adapterbank.kinds.regression import REGRESSION
from adapterbank.kinds.span import SPAN
from adapterbank.kinds.tagging import TAGGING

KINDS: dict[str, Kind] = {kind.name: kind for kind in (CLASSIFICATION, MULTILABEL, REGRESSION, SPAN, TAGGING)}
"""By name. Where the user states no kind, the last row that recognizes the columns is used; the first fits any."""


def find_kind(name: str) -> Kind:
    """Return the kind of this name."""
    if name not in KINDS:
        raise UnknownName(name, "a kind of task", KINDS)
    return KINDS[name]
