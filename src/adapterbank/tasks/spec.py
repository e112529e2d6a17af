"""A task and its examples, as plain values. It knows no file formats, tokenizers or models."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from adapterbank import schema
from adapterbank.errors import InputError
from adapterbank.kinds.kind import TEMPERATURES, Kind
from adapterbank.kinds.scoring import check_metric
from adapterbank.kinds.table import find_kind


@dataclass(frozen=True)
class Task:
    """What is predicted from a text. It is checked on creation, so that every task can be scored."""

    name: str
    kind: str
    """A name in `adapterbank.kinds.table.KINDS`."""
    text: tuple[str, ...]
    """The column of the text, or of the two texts; for span: (question, context). `title,body` joins two columns."""
    label: str
    """The column of the label; for span: of the answer. `a,b,c` is a column of 0 and 1 for each label."""
    labels: tuple[str, ...]
    """The names of the labels, in the order of the head's outputs; none for kinds without labels."""
    metric: str
    """A name in `adapterbank.metrics.METRICS` that fits the kind."""
    threshold: float | None = None
    """Span: by how much "no answer" must score above the best answer to be chosen; None: it never is."""
    label_separator: str | None = None
    """Between the labels of a cell; None for the usual ways to write several."""
    temperature: float | None = schema.limited(None, low=TEMPERATURES[0], high=TEMPERATURES[1])
    """What outputs are divided by before they become probabilities; None: nothing was fitted."""
    thresholds: tuple[Annotated[float, {"low": 0, "high": 1}], ...] = ()
    """The probability above which each label is chosen, if other than one half. Of two classes, they add up to 1."""

    def __post_init__(self) -> None:
        kind = find_kind(self.kind)
        if len(self.text) not in kind.text_counts:
            raise InputError(f"Task {self.name!r} needs {_text_columns(kind)}, but has {list(self.text)}.")
        self._check_labels(kind)
        check_metric(self.metric, kind, self.labels)
        if (self.temperature or self.thresholds) and not kind.confidence:
            raise InputError(f"Task {self.name!r} is {self.kind}, which has no probabilities to calibrate.")
        if self.thresholds and len(self.thresholds) != len(self.labels):
            raise InputError(
                f"Task {self.name!r} has {len(self.thresholds)} thresholds for {len(self.labels)} labels; "
                f"it needs one for each."
            )

    def _check_labels(self, kind: Kind) -> None:
        if not kind.fewest_labels and self.labels:
            raise InputError(f"Task {self.name!r} is {self.kind}, which has no labels; name none.")
        if len(self.labels) < kind.fewest_labels:
            raise InputError(
                f"Task {self.name!r} is {self.kind}, which needs {kind.fewest_labels} labels or more; "
                f"it has {list(self.labels)}."
            )
        repeated = sorted(name for name, count in Counter(self.labels).items() if count > 1)
        if repeated:
            raise InputError(f"Task {self.name!r} names the label {repeated[0]!r} twice; name each label once.")

    def to_json(self) -> dict[str, Any]:
        """Return the task as a dict of plain values; what came after the first release only where it is set."""
        values = {**asdict(self), "text": list(self.text), "labels": list(self.labels)}
        later: dict[str, Any] = {"label_separator": self.label_separator, "temperature": self.temperature}
        later |= {"thresholds": list(self.thresholds)}
        return {name: value for name, value in {**values, **later}.items() if name not in later or value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        """Return the task that `to_json` wrote; other keys are ignored."""
        if problem := schema.problem(cls, data):
            raise InputError(f"A stored task cannot be used: {problem}.")
        known: dict[str, Any] = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        sequences = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**{**known, **sequences})


def _text_columns(kind: Kind) -> str:
    counts = " or ".join(("one", "two")[count - 1] for count in kind.text_counts)
    names = f" ({', '.join(kind.text_columns)})" if kind.text_columns else ""
    return f"{counts} text column{'' if kind.text_counts == (1,) else 's'}{names}"


@dataclass(frozen=True)
class Examples:
    """Rows of a task, in order: column by column, as tokenizers take them."""

    texts: list[str]
    pairs: list[str] | None = None
    """The second texts, if the task has two; for span the contexts."""
    targets: list[Any] | None = None
    """As the kind's `read_targets` returns them. Classification: index into the labels; multilabel: tuple of indices;
    regression: float; span: (start, end, tuple of all acceptable answers), counted in characters of the context, and
    (-1, -1, ("",)) for a question without an answer."""

    def __post_init__(self) -> None:
        for name, column in (("pairs", self.pairs), ("targets", self.targets)):
            if column is not None and len(column) != len(self.texts):
                raise InputError(
                    f"There are {len(self.texts)} texts and {len(column)} {name}; give the same number of each."
                )

    def __len__(self) -> int:
        return len(self.texts)

    def keys(self) -> list[Any]:
        """Return what makes a row's texts equal to another's: the text, or both of a pair."""
        return self.texts if self.pairs is None else list(zip(self.texts, self.pairs, strict=True))

    def select(self, indices: Iterable[int]) -> Examples:
        """Return the rows with these indices, in this order."""
        rows = list(indices)
        return Examples(
            texts=[self.texts[row] for row in rows],
            pairs=None if self.pairs is None else [self.pairs[row] for row in rows],
            targets=None if self.targets is None else [self.targets[row] for row in rows],
        )

    def fingerprint(self) -> str:
        """Return a sha256 over texts, pairs and targets, so that a record can name its data exactly."""
        # One JSON line for each row: quotes and escapes keep fields and rows apart whatever the texts contain,
        # and ASCII escapes make every string hashable, lone surrogates included.
        digest = hashlib.sha256()
        for row, text in enumerate(self.texts):
            pair = None if self.pairs is None else self.pairs[row]
            target = None if self.targets is None else self.targets[row]
            digest.update(json.dumps([text, pair, target], ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()
