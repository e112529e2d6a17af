"""`Kind`: everything the library asks of a kind of task, such as classification or regression.

A kind is one file in this folder that ends with a `Kind(...)`, and one row in `kinds/table.py`. To add one, copy
`regression.py`, the shortest. Everything else asks the row and never compares the kind's name. A kind's file imports
torch and numpy inside functions only, so that describing, reading and storing a task needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from adapterbank.encoder.batch import Tokens
    from adapterbank.inference.rows import Rows
    from adapterbank.metrics import Metric
    from adapterbank.slots.plan import Head
    from adapterbank.tasks.columns import Columns
    from adapterbank.tasks.spec import Examples, Task
    from adapterbank.tasks.tables import Table


TEMPERATURES = (0.05, 20.0)
"""The smallest and the largest temperature: beyond them, probabilities are 0 and 1, or all equal."""


@dataclass  # not frozen: there is one for each request, and a frozen dataclass takes longer to create
class HeadOutputs:
    """A task's examples, the rows of tokens made from them, and the head's outputs for each row."""

    task: Task
    examples: Examples
    rows: Rows
    outputs: Sequence[np.ndarray]
    """`[outputs]` for each row, or `[tokens, outputs]` for kinds with `per_token`."""

    @cached_property
    def matrix(self) -> np.ndarray:
        """The outputs of each example as one array, `[examples, outputs]`; not for kinds with `per_token`."""
        import numpy as np

        return self.rows.pool(np.array(self.outputs))

    @cached_property
    def logits(self) -> np.ndarray:
        """The matrix in float64, divided by the task's temperature: the probabilities are made of these."""
        import numpy as np

        return self.matrix.astype(np.float64) / (self.task.temperature or 1.0)


@dataclass(frozen=True)
class ReportTable:
    """A table that `adapterbank evaluate` prints below the scores; without a header only its title."""

    title: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def _array(targets: Sequence[Any], labels: int) -> np.ndarray:
    import numpy as np

    return np.array(targets)


def _integers(predicted: np.ndarray) -> list[Any]:
    return [int(one) for one in predicted]


@dataclass(frozen=True)
class Estimator:
    """How scikit-learn's models learn a kind of task (method `automl`); by default as classifiers."""

    regressor: bool = False
    """Whether the model predicts numbers instead of classes."""
    per_label: bool = False
    """Whether one classifier is fitted for each label."""
    encode: Callable[[Sequence[Any], int], np.ndarray] = _array
    """(targets, number of labels) -> the array to fit."""
    decode: Callable[[np.ndarray], list[Any]] = _integers
    """The array predicted -> what the metric compares."""


@dataclass(frozen=True)
class Confidence:
    """How certain the answers of a kind with probabilities are; `calibration` and `reliability` ask for it."""

    choices: Callable[[np.ndarray, Sequence[Any]], tuple[np.ndarray, np.ndarray]]
    """(logits `[rows, labels]`, targets) -> each choice between options that exclude each other as a row of logits,
    `[choices, options]`, and the right option of each."""
    choose: Callable[[np.ndarray, Sequence[float]], list[Any]]
    """(probabilities `[rows, labels]`, a threshold for each label) -> the prediction of each row."""
    certainty: Callable[[np.ndarray, Sequence[Any]], np.ndarray]
    """(probabilities, predictions) -> the probability of each prediction, of its least certain part."""
    columns: Callable[[np.ndarray, Sequence[Any], Metric], tuple[np.ndarray, np.ndarray] | None]
    """(probabilities, targets, metric) -> the probabilities that thresholds are chosen for, and whether each label is
    true, both `[rows, columns]`; None if a threshold does not help this metric."""
    thresholds: Callable[[Sequence[float]], tuple[float, ...]]
    """The thresholds of these columns -> a threshold for each label."""


@dataclass(frozen=True)
class Kind:
    """One row of the table of kinds. A field without a default must be stated; the others fit most kinds."""

    name: str

    # --- metrics: what a prediction and a target are, and how they are scored

    metrics: tuple[str, ...]
    """Names in `metrics.METRICS` that can score it; the first is the default."""
    reported: tuple[str, ...]
    """The metrics of every report, beside the task's own."""
    check_prediction: Callable[[Any, int, str], Any]
    """(prediction, number of labels, what to call it) -> the value that metrics take; raises if it is not one."""
    check_target: Callable[[Any, int, str], Any]
    """The same for a target."""

    # --- targets: from a cell to the loss

    read_targets: Callable[[Table, Task, Sequence[int]], tuple[list[Any], list[str]]]
    """(table, task, row numbers) -> the targets of these rows as `Examples` keeps them, and notes for the user."""
    targets: Callable[[Sequence[Any], Head], Tensor]
    """Targets of rows -> a tensor with one entry for each row."""
    loss: Callable[[Tensor, Tensor, Head, Tensor], Tensor]
    """(outputs, targets, head, tokens of each row) -> one loss for each row. Outputs are `[rows, outputs]`, or padded
    to `[rows, longest, outputs]` with `per_token`."""
    consistency: Callable[[Tensor, Tensor, Tensor, Head, Tensor], Tensor]
    """(outputs of one pass, those of another, then as `loss`) -> how much they differ, one number for each row, which
    `--mix` adds to the loss: the symmetric divergence of probabilities, or the squared difference of numbers."""

    # --- predictions: from outputs to what users and metrics see

    decide: Callable[[HeadOutputs], list[Any]]
    """The prediction of each example as metrics compare it."""
    predict: Callable[[HeadOutputs, int], list[dict[str, Any]]]
    """(outputs, how many of the best answers to list) -> the fields of each example's `Prediction` that are set,
    without its probabilities."""
    probabilities: Callable[[np.ndarray], np.ndarray] | None = None
    """Outputs, float64 `[rows, outputs]` -> the probability of each label; None for kinds that have none."""
    confidence: Confidence | None = None
    """How certain its answers are; None for kinds that cannot tell."""
    readings: Callable[[HeadOutputs, int], list[Any]] | None = None
    """(outputs, count) -> the best answers of each example with their scores, for `OpenBank.read` and SQuAD's files;
    None for kinds that answer no questions."""

    # --- columns: how a table states the task

    fewest_labels: int = 0
    """How many labels a task must have at least; 0 for kinds without labels."""
    single_label: bool = False
    """Whether a target is the index of one label: a split then keeps the mix of labels, and the loss can weight
    them."""
    several_labels: bool = False
    """Whether a target is a tuple of indices of labels, and a cell may hold several."""
    text_counts: tuple[int, ...] = (1, 2)
    """How many texts a row may have."""
    words: bool = False
    """Whether a text may be given as a list of its words; see `kinds.words`."""
    text_columns: tuple[str, ...] = ()
    """The usual names of its text columns, if only these will do."""
    label_columns: tuple[str, ...] = ()
    """The usual names of its label column, if only these will do."""
    recognizes: Callable[[Columns, Sequence[Any]], bool] = lambda columns, values: False
    """Whether columns and the label column's values look like this kind, where the user stated none."""
    infer_labels: Callable[[Table, str, Sequence[int]], tuple[str, ...]] = lambda table, column, rows: ()
    """(table, label column, rows that have a text) -> the label names, in the order of the head's outputs."""
    cell_labels: Callable[[Any], list[str]] = lambda value: []
    """The names of the labels in a cell."""
    blank_is_label: bool = False
    """Whether a cell of whitespace is a label; otherwise the row is refused."""
    clean: Callable[[Any], Any] = lambda value: value.strip() if isinstance(value, str) else value
    """A label as a file of the catalog holds it -> the label, or None for a row without one."""
    initial_threshold: Callable[[Sequence[Any]], float | None] = lambda values: None
    """Values of the label column -> `Task.threshold` before training."""
    profile: Callable[[Sequence[Any]], dict[str, Any]] = lambda values: {}
    """Values of the label column -> what `adapterbank data` reports of them beside the counts of labels."""
    profile_text: Callable[[Mapping[str, Any]], str] = lambda profile: ""
    """The same as a line of text; empty for none."""

    # --- head and rows

    per_token: bool = False
    """Whether the head gives outputs for each token instead of each row."""
    outputs: Callable[[int], int] = lambda labels: labels
    """Number of labels -> number of the head's outputs."""
    weight: Callable[[Any], float] | None = None
    """Target of a row -> how much its loss counts beside those of other rows; None if all count the same."""
    standardize: Callable[[Sequence[Any]], tuple[float, float]] | None = None
    """Training targets -> the shift and scale of the head's output; None for kinds whose outputs are used as they
    are."""
    window_targets: Callable[[Sequence[Tokens], Any], list[Any]] | None = None
    """(windows of a document, target of the example) -> the target of each window, or an empty list to leave the
    example out of training. None for kinds that cut long texts instead of reading them in windows."""

    # --- after training

    tune: Callable[[HeadOutputs], Task] = lambda dev: dev.task
    """Outputs on dev, with targets -> the task with what is chosen at the end of training, such as a threshold."""
    collapsed: Callable[[Task, Sequence[Any], Sequence[Any]], str] = lambda task, decisions, targets: ""
    """(task, predictions, targets) -> the one answer to all rows, in words, if the targets differ; else empty."""
    prior_loss: Callable[[Sequence[Any], int], float] | None = None
    """(training targets, number of labels) -> the mean loss of always giving the prior; None if that is unknown."""
    details: Callable[[Sequence[Any], Sequence[Any], Sequence[str]], dict[str, Any]] = (
        lambda predictions, targets, labels: {}
    )
    """(checked predictions, checked targets, labels) -> what a report holds beside the metrics."""
    tables: Callable[[Mapping[str, Any], Sequence[str]], list[ReportTable]] = lambda report, labels: []
    """(report, labels) -> tables that `adapterbank evaluate` prints below the scores."""
    estimator: Estimator | None = None
    """How method `automl` learns it; None if it cannot."""

    @property
    def windows(self) -> bool:
        """Whether a document longer than the limit becomes several overlapping rows."""
        return self.window_targets is not None
