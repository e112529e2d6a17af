"""Tagging: every word of a text has one of the task's tags: entities, or plain tags such as parts of speech.

A word is tagged where its first token is. In a text of several windows it is read in the one where it has most context.
Tags of a scheme (`schemes`) become IOB2 when they are read, and the tags that are chosen are always those of entities:
the most probable sequence in which no entity continues that has not begun.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterbank.errors import InputError
from adapterbank.kinds import schemes, tag_cells
from adapterbank.kinds.divergence import between_softmaxes
from adapterbank.kinds.kind import HeadOutputs, Kind, ReportTable
from adapterbank.kinds.values import short
from adapterbank.kinds.words import Span, Words, word_spans
from adapterbank.metrics import entities, found_and_true, marks_entities

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from adapterbank.encoder.batch import Tokens
    from adapterbank.slots.plan import Head
    from adapterbank.tasks.spec import Task

_NO_WORD = -100
"""The target of a token that is not the first of a word."""


# --- words and their tokens -----------------------------------------------------------------------------------


def first_tokens(window: Tokens, spans: Sequence[Span], *, first: bool) -> np.ndarray:
    """Return the first token of each word in a window, -1 for a word that has none there.

    `first` is whether the text begins in the window; otherwise a word may have begun before it.
    """
    import numpy as np

    assert window.offsets is not None
    inside = np.flatnonzero(window.offsets[:, 0] >= 0)
    if not len(inside) or not len(spans):
        return np.full(len(spans), -1)
    starts, ends = window.offsets[inside].T
    begins, stops = np.array(spans).T
    place = np.minimum(np.searchsorted(np.maximum.accumulate(ends), begins, side="right"), len(inside) - 1)
    good = (ends[place] > begins) & (starts[place] < stops)
    if not first:
        good &= (place > 0) | (starts[place] <= begins)
    return np.where(good, inside[place], -1)


def _window_targets(windows: Sequence[Tokens], target: Any) -> list[Any]:
    import numpy as np

    spans, indices = [(start, end) for start, end, *_ in target], np.array([one[2] for one in target], np.int64)
    found = []
    for number, window in enumerate(windows):
        wanted = np.full(len(window.ids), _NO_WORD)
        places = first_tokens(window, spans, first=number == 0)
        wanted[places[places >= 0][::-1]] = indices[places >= 0][::-1]  # of words that share a token, the first
        found.append(wanted)
    return found


def _targets(targets: Sequence[Any], head: Head) -> Tensor:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([torch.from_numpy(row) for row in targets], batch_first=True, padding_value=_NO_WORD)


def _loss(x: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    """Return the mean cross-entropy of the words of each row."""
    import torch.nn.functional as F

    wanted = _wanted(x, targets)
    each = F.cross_entropy(x.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=_NO_WORD)
    words = (wanted != _NO_WORD).sum(1).clamp(min=1)
    return each.view(wanted.shape).sum(1) / words


def _consistency(x: Tensor, y: Tensor, targets: Tensor, head: Head, counts: Tensor) -> Tensor:
    """Return the mean divergence of the words of each row."""
    words = _wanted(x, targets) != _NO_WORD
    return (between_softmaxes(x, y) * words).sum(1) / words.sum(1).clamp(min=1)


def _wanted(x: Tensor, targets: Tensor) -> Tensor:
    """Return the targets of `[rows, longest, outputs]`, cut or filled up to the longest row."""
    import torch.nn.functional as F

    width = x.shape[1]
    return F.pad(targets, (0, max(0, width - targets.shape[1])), value=_NO_WORD)[:, :width]


# --- tags from outputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tagged:
    """The words of a text with the tag of each and its probability."""

    spans: Sequence[Span]
    tags: tuple[str, ...]
    likely: Sequence[float]


def _tagged(given: HeadOutputs) -> list[_Tagged]:
    labels, found = given.task.labels, []
    for mine, text in zip(given.rows.by_example(len(given.examples)), given.examples.texts, strict=True):
        spans = word_spans(text)
        scores = _word_scores([given.rows.tokens[row] for row in mine], [given.outputs[row] for row in mine], spans)
        path = schemes.best_path(scores, labels)
        likely = [math.exp(scores[word, label]) for word, label in enumerate(path.tolist())]
        found.append(_Tagged(spans, tuple(labels[label] for label in path), likely))
    return found


def _word_scores(windows: Sequence[Tokens], outputs: Sequence[np.ndarray], spans: Sequence[Span]) -> np.ndarray:
    """Return the log-probability of each label for each word; a word without tokens has the same for all."""
    import numpy as np

    found = np.zeros((len(spans), outputs[0].shape[1]))
    context = np.full(len(spans), -1)
    for number, (window, out) in enumerate(zip(windows, outputs, strict=True)):
        places = first_tokens(window, spans, first=number == 0)
        room = np.where(places >= 0, np.minimum(places, len(out) - 1 - places), -1)
        chosen = room > context
        found[chosen], context[chosen] = out[places[chosen]], room[chosen]
    shifted = found - found.max(1, keepdims=True) if len(found) else found
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def _decide(given: HeadOutputs) -> list[Any]:
    return [one.tags for one in _tagged(given)]


def _predict(given: HeadOutputs, best: int) -> list[dict[str, Any]]:
    found, marked = [], marks_entities(given.task.labels)
    for one, text in zip(_tagged(given), given.examples.texts, strict=True):
        parts = entities(one.tags) if marked else [(tag, k, k + 1) for k, tag in enumerate(one.tags)]
        answers = [_answer(text, one, *part) for part in parts]
        fields: dict[str, Any] = {"entities" if marked else "words": answers}
        found.append(fields | ({"tags": list(one.tags)} if isinstance(text, Words) else {}))
    return found


def _answer(text: str, tagged: _Tagged, label: str, first: int, end: int) -> dict[str, Any]:
    """Return an entity or a word; its probability is the lowest of its words."""
    start, stop = tagged.spans[first][0], tagged.spans[end - 1][1]
    likely = round(min(tagged.likely[first:end]), 6)
    return {"text": text[start:stop], "label": label, "start": start, "end": stop, "probability": likely}


# --- scores ---------------------------------------------------------------------------------------------------


def _check_prediction(value: Any, labels: int, what: str) -> tuple[str, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(tag, str) for tag in value):
        raise InputError(f"{what} is {short(value)}, not the tags of a text's words.")
    return tuple(value)


def _check_target(value: Any, labels: int, what: str) -> tuple[str, ...]:
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(one, (tuple, list)) and len(one) == 4 for one in value
    ):
        raise InputError(f"{what} is {short(value)}, not the start, end, index and tag of each word.")
    return tuple(one[3] for one in value)


def _collapsed(task: Task, decisions: Sequence[Any], targets: Sequence[Any]) -> str:
    given, true = (
        {tag for row in rows for tag in row} for rows in (decisions, [_check_target(t, 0, "") for t in targets])
    )
    return repr(next(iter(given))) if len(given) == 1 < len(true) else ""


def _prior_loss(targets: Sequence[Any], labels: int) -> float:
    """Return the entropy of the tags; the targets are those of windows."""
    import numpy as np

    counts = Counter(np.concatenate(targets).tolist())
    counts.pop(_NO_WORD, None)
    return -sum(count / counts.total() * math.log(count / counts.total()) for count in counts.values())


def _details(predictions: Sequence[Any], targets: Sequence[Any], labels: Sequence[str]) -> dict[str, Any]:
    given, true = found_and_true(predictions, targets)
    sums = [Counter(one[0] for one in some) for some in (given & true, given, true)]
    types = {name: _scores([count[name] for count in sums]) for name in sorted(sums[1] | sums[2])}
    every = _scores([count.total() for count in sums])
    shares = {name: every[name] for name in ("precision", "recall")} if marks_entities(labels) else {}
    return {**shares, "types": types, "all_types": every}


def _scores(counts: Sequence[int]) -> dict[str, Any]:
    right, given, true = counts
    share = {"precision": right / given if given else 0.0, "recall": right / true if true else 0.0}
    return {**share, "f1": 2 * right / (given + true) if given + true else 0.0, "support": true}


def _tables(report: Mapping[str, Any], labels: Sequence[str]) -> list[ReportTable]:
    shown = ("precision", "recall", "f1")
    rows = [*report["types"].items(), ("all", report["all_types"])]
    first, last = ("type", "entities") if marks_entities(labels) else ("tag", "words")
    cells = [[name, *(f"{one[key]:.3f}" for key in shown), str(one["support"])] for name, one in rows]
    return [ReportTable(header=[first, *shown, last], rows=cells)]


TAGGING = Kind(
    name="tagging",
    metrics=("tag_f1", "tag_accuracy"),
    reported=("tag_accuracy",),
    check_prediction=_check_prediction,
    check_target=_check_target,
    details=_details,
    tables=_tables,
    fewest_labels=2,
    text_counts=(1,),
    words=True,
    recognizes=tag_cells.recognizes,
    infer_labels=tag_cells.infer_labels,
    cell_labels=tag_cells.cell_labels,
    clean=lambda label: label,
    read_targets=tag_cells.read_targets,
    per_token=True,
    window_targets=_window_targets,
    weight=lambda target: float((target != _NO_WORD).sum()),  # all words of a step count the same
    targets=_targets,
    loss=_loss,
    consistency=_consistency,
    decide=_decide,
    predict=_predict,
    collapsed=_collapsed,
    prior_loss=_prior_loss,
)
