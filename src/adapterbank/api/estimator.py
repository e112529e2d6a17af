"""A scikit-learn classifier of texts: adapters on a frozen encoder, without a bank. The weights are its own state."""

from __future__ import annotations

import contextlib
import difflib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from adapterbank.api.opened import open_bank
from adapterbank.api.options import DEFAULTS, ModelOptions, listing
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.errors import ArrayError, InputError
from adapterbank.inference.engine import Engine
from adapterbank.kinds.values import short
from adapterbank.storage.package import Array, Package
from adapterbank.tasks.spec import Examples

_NAME = "texts"
"""The name of the one task that an estimator has."""


@dataclass(frozen=True)
class HeldPackage(Package):
    """A package whose tensors are in memory."""

    held: Mapping[str, Array] = field(repr=False)

    def tensors(self, largest: int | None = None) -> dict[str, Array]:
        """Return the tensors."""
        return dict(self.held)


class AdapterClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classify texts, or pairs of texts, with adapters on a frozen encoder.

        AdapterClassifier("minilm", epochs=5).fit(texts, labels).predict_proba(texts)

    It takes part in `cross_val_score`, `GridSearchCV` and a `Pipeline`. A pickle contains the trained weights, and
    loads the encoder by its name when it first predicts.

    Attributes:
        classes_: The labels, sorted; the columns of `predict_proba`.
        package_: What was trained: manifest and tensors.
        record_: The record of the run: config, scores on the rows held out, counts, time.
    """

    @listing(ModelOptions)
    def __init__(self, backbone: str = "minilm", *, progress: bool = False, **options: Unpack[ModelOptions]) -> None:
        """Take the options of a training; nothing is checked or loaded before `fit`.

        Args:
            backbone: The encoder: a folder, a short name or a name on the hub.
            progress: Show progress and notes.
            options: Any option of `OpenBank.train` that describes what is trained, and how.
        """
        names = ModelOptions.__annotations__
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"AdapterClassifier has no option {name!r}.{hint}")
        self.backbone, self.progress = backbone, progress
        for name in names:
            setattr(self, name, options.get(name, DEFAULTS[name]))

    def fit(self, X: Any, y: Any) -> AdapterClassifier:
        """Train on texts and their labels; with many rows per class, a tenth is held out to choose the best epoch.

        Args:
            X: A list, array or Series of texts; for pairs, a list of tuples, or an array or a frame of two columns.
            y: A label for each row.
        """
        rows = _examples(X)
        if y is None:
            raise ArrayError("AdapterClassifier requires y to be passed, but the target y is None; give a label a row.")
        labels = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        if len(labels) != len(rows):
            raise ArrayError(f"There are {len(rows)} texts and {len(labels)} labels; give the same number of each.")
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ArrayError(f"y has one class, {self.classes_[0]!r}; a classifier needs at least two classes.")
        columns = {"text": rows.texts} | ({"text_pair": rows.pairs} if rows.pairs else {})
        self._train({**columns, "label": [str(code) for code in codes]})
        return self

    def _train(self, table: Mapping[str, Sequence[str]]) -> None:
        """Train in a temporary bank, and keep what it holds then."""
        options: dict[str, Any] = {name: getattr(self, name) for name in ModelOptions.__annotations__}
        places = {name: options.pop(name) for name in ("device", "precision")}
        options |= {"kind": "classification", **{name: name for name in table}}
        options["labels"] = [str(code) for code in range(len(self.classes_))]  # also where no row of one has a text
        with tempfile.TemporaryDirectory(prefix="adapterbank-") as folder, _value_errors():
            bank = open_bank(Path(folder, "bank"), self.backbone, **places)
            found = bank.train(_NAME, table, progress=self.progress, **options)
            if found.package is None:
                raise InputError(f"method is {self.method!r}, which leaves nothing to predict with; choose another.")
            self.package_ = HeldPackage(found.package.manifest, Path(_NAME), found.package.tensors())
            self.record_ = found.record
            self._engine: Engine | None = self._loaded(bank.backbone)

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, `[rows, classes]`, in the order of `classes_`."""
        check_is_fitted(self)
        examples, names = _examples(X), self.package_.manifest.task["labels"]
        reads = len(self.package_.manifest.task["text"])
        if reads != (1 if examples.pairs is None else 2):
            raise ArrayError(f"X has {'one text' if reads == 2 else 'two texts'} a row, but was fitted with {reads}.")
        with _value_errors():
            if getattr(self, "_engine", None) is None:  # it comes from a pickle
                self._engine = self._loaded(load(self.backbone))
            assert self._engine is not None
            (found,) = self._engine.predict([(_NAME, examples)])
        order = sorted(range(len(names)), key=lambda k: int(names[k]))
        likely = np.array([list((one.probabilities or {}).values()) for one in found])
        return likely[:, order]

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        likely = self.predict_proba(X)
        return np.asarray(self.classes_[likely.argmax(axis=1)])

    def _loaded(self, encoder: Backbone) -> Engine:
        """Return the encoder on its device, with what was trained."""
        engine = Engine(encoder, device=self.device, precision=self.precision)
        engine.load(self.package_, _NAME)
        return engine

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the encoder, which is loaded again."""
        return {name: value for name, value in super().__getstate__().items() if name != "_engine"}

    def __sklearn_is_fitted__(self) -> bool:
        """Whether `fit` has ended."""
        return hasattr(self, "package_")

    def __sklearn_tags__(self) -> Any:
        """Say that it reads texts: one column of strings, or two."""
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, True, False
        return tags


@contextlib.contextmanager
def _value_errors() -> Iterator[None]:
    """Raise what is wrong with the input as the `ValueError` that scikit-learn expects."""
    try:
        yield
    except InputError as error:
        raise ArrayError(str(error)) from error


def _examples(X: Any) -> Examples:
    """Return the rows of X: a text each, or two."""
    if isinstance(X, str):
        raise ArrayError("X is one string; pass a list of texts, such as [text].")
    if hasattr(X, "to_numpy"):  # a Series or a frame
        X = X.to_numpy()
    rows = X.tolist() if isinstance(X, np.ndarray) else X
    if not isinstance(rows, Sequence):
        raise ArrayError(f"X is a {type(X).__name__}; pass a list, an array or a Series of texts.")
    if not rows:
        raise ArrayError("X has 0 samples, and a minimum of 1 is required; pass at least one text.")
    split = [tuple(row) if isinstance(row, list | tuple) else (row,) for row in rows]
    width = len(split[0])
    for number, row in enumerate(split, 1):
        if len(row) != width or width not in (1, 2) or not all(isinstance(text, str) for text in row):
            raise ArrayError(f"Row {number} of X is {short(rows[number - 1])}; each row is a text, or each two texts.")
    return Examples([row[0] for row in split], [row[1] for row in split] if width == 2 else None)
