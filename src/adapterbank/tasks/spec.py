"""A task and its examples, as plain values. It knows no file formats, tokenizers or models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from adapterbank.errors import InputError, UnknownName
from adapterbank.metrics import check_metric

KINDS = ("classification", "multilabel", "regression", "span")

_FEWEST_LABELS = {"classification": 2, "multilabel": 1}


@dataclass(frozen=True)
class Task:
    """What is asked of a text; checked on creation, so that a task at hand is a task that can be scored."""

    name: str
    kind: str
    """One of `KINDS`."""
    text: tuple[str, ...]
    """The column of the text, or of the two texts; for span: (question, context)."""
    label: str
    """The column of the label; for span: of the answer."""
    labels: tuple[str, ...]
    """The names of the labels, in the order of the head's outputs; none for regression and span."""
    metric: str
    """A name in `adapterbank.metrics.METRICS` that fits the kind."""
    threshold: float | None = None
    """Span: by how much "no answer" must score above the best answer to be given; None: it never is."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName(self.kind, "a kind of task", KINDS)
        if len(self.text) not in ((2,) if self.kind == "span" else (1, 2)):
            wanted = "two text columns (question, context)" if self.kind == "span" else "one or two text columns"
            raise InputError(f"Task {self.name!r} needs {wanted}, and has {list(self.text)}.")
        self._check_labels()
        check_metric(self.metric, self.kind, self.labels)

    def _check_labels(self) -> None:
        fewest = _FEWEST_LABELS.get(self.kind, 0)
        if not fewest and self.labels:
            raise InputError(f"Task {self.name!r} is {self.kind}, which has no labels; state none.")
        if len(self.labels) < fewest:
            raise InputError(
                f"Task {self.name!r} is {self.kind}, which needs {fewest} labels or more; it has {list(self.labels)}."
            )
        twice = sorted(name for name in set(self.labels) if self.labels.count(name) > 1)
        if twice:
            raise InputError(f"Task {self.name!r} names the label {twice[0]!r} twice; name each label once.")

    def to_json(self) -> dict[str, Any]:
        """Return the task as a dict of plain values."""
        return {**asdict(self), "text": list(self.text), "labels": list(self.labels)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        """Return the task that `to_json` wrote; other keys are left to those who know them."""
        missing = [f.name for f in fields(cls) if f.name not in data and f.default is MISSING]
        if missing:
            raise InputError(f"A stored task lacks {', '.join(missing)}; it has: {', '.join(data)}.")
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        threshold = known.get("threshold")
        if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, (int, float))):
            raise InputError(f"A stored task has the threshold {threshold!r}, which must be a number.")
        for name in ("text", "labels"):
            if not isinstance(known[name], (list, tuple)):
                raise InputError(f"A stored task has {name} {known[name]!r}, which must be a list of names.")
        return cls(**{**known, "text": tuple(known["text"]), "labels": tuple(known["labels"])})


@dataclass(frozen=True)
class Examples:
    """Rows of a task, in order: column by column, as a tokenizer wants them."""

    texts: list[str]
    pairs: list[str] | None = None
    """The second texts, where the task has two; for span the contexts."""
    targets: list[Any] | None = None
    """Classification: index into the labels; multilabel: tuple of indices; regression: float;
    span: (start, end, tuple of all acceptable answer texts), counted in characters of the context, and
    (-1, -1, ("",)) for a question without an answer."""

    def __post_init__(self) -> None:
        for name, column in (("pairs", self.pairs), ("targets", self.targets)):
            if column is not None and len(column) != len(self.texts):
                raise InputError(f"There are {len(self.texts)} texts and {len(column)} {name}, not as many.")

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Iterable[int]) -> Examples:
        """Return the rows at these places, in the order asked for."""
        places = list(indices)
        return Examples(
            texts=[self.texts[place] for place in places],
            pairs=None if self.pairs is None else [self.pairs[place] for place in places],
            targets=None if self.targets is None else [self.targets[place] for place in places],
        )

    def fingerprint(self) -> str:
        """Return a sha256 over texts, pairs and targets, so that a record can name its data exactly."""
        # One JSON line a row: quotes and escapes keep fields and rows apart whatever the texts hold,
        # and ASCII escapes make every string hashable, lone surrogates too.
        digest = hashlib.sha256()
        for place, text in enumerate(self.texts):
            pair = None if self.pairs is None else self.pairs[place]
            target = None if self.targets is None else self.targets[place]
            digest.update(json.dumps([text, pair, target], ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()
