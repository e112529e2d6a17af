"""Tagging: every word of a text has one of the task's tags: entities, or plain tags such as parts of speech.

A word is tagged where its first token is. In a text of several windows it is read in the one where it has most context.
Tags of a scheme (`schemes`) become IOB2 when they are read, and the tags that are chosen are always those of entities:
the most probable sequence in which no entity continues that has not begun.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError, InputError
from adapterbank.kinds import schemes
from adapterbank.kinds.kind import HeadOutputs, Kind, ReportTable
from adapterbank.kinds.labels import in_order, is_list_text, items_of, label_name
from adapterbank.kinds.values import as_number, as_text, is_missing, listed, short
from adapterbank.kinds.words import Span, Words, joined, word_spans
from adapterbank.metrics import OUTSIDE, Entity, entities, found_and_true, marks_entities

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from adapterbank.encoder.batch import Tokens
    from adapterbank.slots.plan import Head
    from adapterbank.tasks.columns import Columns
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

WORD_COLUMNS = ("tokens", "words")
"""Usual names of a column whose cells are lists of words."""
_NO_WORD = -100
"""The target of a token that is not the first of a word."""
_STARTS, _ENDS, _NAMES = ("start", "start_offset"), ("end", "end_offset"), ("label", "type", "entity_group", "tag")


# --- tags in a table ------------------------------------------------------------------------------------------


def _is_span(item: Any) -> bool:
    """Return whether an item of a cell is a stretch of characters with a label."""
    if isinstance(item, Mapping):
        return any(name in item for name in _STARTS) and any(name in item for name in _ENDS)
    return isinstance(item, (list, tuple)) and len(item) == 3 and as_number(item[0]) is not None


def _recognizes(columns: Columns, values: Sequence[Any]) -> bool:
    """Return whether the cells are lists of spans, or lists beside lists of words; CSV has lists as text."""
    if not all(isinstance(value, (list, tuple)) or is_list_text(value) for value in values):
        return False
    has_words = columns.text[0].strip().lower() in WORD_COLUMNS
    return _has_spans(values) or (has_words and any(_items(value) for value in values))


def _items(value: Any) -> list[Any]:
    return items_of(value) if is_list_text(value) else list(value) if isinstance(value, (list, tuple)) else [value]


def _has_spans(values: Iterable[Any]) -> bool:
    return any(_is_span(item) for value in values if isinstance(value, (list, tuple)) for item in value)


def _cell_labels(value: Any) -> list[str]:
    """Return the types of a cell's entities, or its plain tags."""
    items = _items(value)
    if _has_spans([items]):
        return [label_name(label) for *_, label in map(_span_parts, items) if not is_missing(label)]
    names = [label_name(item) for item in items if not is_missing(item)]
    return [kind for kind, _, _ in entities(names)] if marks_entities(names) else names


def _span_parts(item: Any) -> list[Any]:
    """Return what an item of a cell states as start, end and label, None for each that it lacks."""
    if isinstance(item, Mapping):
        return [next((item[name] for name in names if name in item), None) for names in (_STARTS, _ENDS, _NAMES)]
    return list(item) if isinstance(item, (list, tuple)) and len(item) == 3 else [None] * 3


def _span_of(item: Any, length: int) -> tuple[int, int, str]:
    """Return the start, the end and the label of a span in a text of so many characters; raise if it is none."""
    first, last, label = _span_parts(item)
    start, end = as_number(first), as_number(last)
    if start is None or end is None or not 0 <= start < end or is_missing(label):
        raise DataError(f"{short(item)} is not a start, a later end and a label")
    if end > length:
        raise DataError(f"{short(item)} ends after the text, which has {length} characters,")
    return int(start), int(end), label_name(label)


def _infer_labels(table: Table, column: str, rows: Sequence[int]) -> tuple[str, ...]:
    cells = [table.columns[column][row] for row in rows if not is_missing(table.columns[column][row])]
    if _has_spans(cells):
        return _entity_labels(label for cell in cells for label in _cell_labels(cell))
    names = [[label_name(item) for item in _items(cell) if not is_missing(item)] for cell in cells]
    every = in_order(name for mine in names for name in mine)
    if every and all(as_number(name) is not None for name in every):
        raise DataError(
            f"{table.source}: the tags in {column!r} are numbers ({listed(every, 3)}); name them in their order with "
            f"--labels O,B-person,I-person,…"
        )
    if schemes.scheme_of(names) == schemes.PLAIN:
        return every
    return _entity_labels(kind for mine in names for kind, _, _ in entities(mine))


def _entity_labels(kinds: Iterable[str]) -> tuple[str, ...]:
    marked = (f"{mark}-{kind}" for kind in dict.fromkeys(kinds) for mark in "BI")
    return (OUTSIDE, *marked)


def _read_targets(table: Table, task: Task, rows: Sequence[int]) -> tuple[list[Any], list[str]]:
    """Return for each row the start, the end, the label's index and the tag of each word."""
    cells = [table.columns[task.label][row] for row in rows]
    spans = [word_spans(_text(table, task, row)) for row in rows]
    read = _from_spans if _has_spans(cells) else _from_tags
    tags, notes = read(table, task, rows, cells, spans)
    index = {label: place for place, label in enumerate(task.labels)}
    for row, mine in zip(rows, tags, strict=True):
        unknown = next((tag for tag in mine if tag not in index), None)
        if unknown is not None:
            raise DataError(
                f"{table.at(row)}: the tag {short(unknown)!r} is not one of the task's ({listed(task.labels)}); "
                f"correct it, or train with rows that have it."
            )
    targets = [
        tuple((start, end, index[tag], tag) for (start, end), tag in zip(words, mine, strict=True))
        for words, mine in zip(spans, tags, strict=True)
    ]
    return targets, notes


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _text(table: Table, task: Task, row: int) -> str:
    value = joined(table.columns[task.text[0]][row])
    return value if isinstance(value, Words) else as_text(value)


def _from_tags(
    table: Table, task: Task, rows: Sequence[int], cells: Sequence[Any], spans: Sequence[Sequence[Span]]
) -> tuple[list[list[str]], list[str]]:
    names = [[label_name(item) for item in _items(cell)] for cell in cells]
    for row, cell, mine, words in zip(rows, cells, names, spans, strict=True):
        empty = next((place for place, item in enumerate(_items(cell), 1) if is_missing(item)), 0)
        if empty:
            raise DataError(
                f"{table.at(row)}: word {empty} has no tag in {task.label!r}; write one, such as {OUTSIDE} for a word "
                f"outside all entities."
            )
        if len(mine) != len(words):
            raise DataError(
                f"{table.at(row)}: {task.text[0]!r} has {_counted(len(words), 'word')}, and {task.label!r} has "
                f"{_counted(len(mine), 'tag')}; give a tag for each word, with the words as a list (--text tokens)."
            )
    notes = []
    numbers = {str(place): label for place, label in enumerate(task.labels)}
    known, used = set(task.labels), {tag for mine in names for tag in mine}
    if used and used <= numbers.keys() and not used & known:
        names = [[numbers[tag] for tag in mine] for mine in names]
        notes.append(f"{table.source}: the numbers in {task.label!r} are read as indices into: {listed(task.labels)}.")
    scheme = schemes.scheme_of(names)
    if scheme == schemes.PLAIN:
        return names, notes
    broken = schemes.count_broken(names, scheme)
    if scheme != schemes.IOB2:
        notes.append(f"{table.source}: the tags in {task.label!r} are {scheme}; they are read as IOB2.")
    if broken:
        notes.append(
            f"{table.source}: {broken} of {len(names)} rows have tags that {scheme} does not allow; an entity that "
            f"does not begin counts from its first word, as in conlleval."
        )
    return [schemes.write_tags(entities(mine), len(mine)) for mine in names], notes


def _from_spans(
    table: Table, task: Task, rows: Sequence[int], cells: Sequence[Any], spans: Sequence[Sequence[Span]]
) -> tuple[list[list[str]], list[str]]:
    found, moved, lost = [], 0, 0
    for row, cell, words in zip(rows, cells, spans, strict=True):
        try:
            wanted = sorted(_span_of(item, len(_text(table, task, row))) for item in _items(cell))
        except DataError as error:
            raise DataError(f"{table.at(row)}: {error} in column {task.label!r}; correct it.") from None
        mine: list[Entity] = []
        for start, end, kind in wanted:
            inside = [place for place, (a, b) in enumerate(words) if a < end and b > start]
            if not inside or (mine and inside[0] < mine[-1][2]):
                lost += 1
                continue
            moved += words[inside[0]][0] != start or words[inside[-1]][1] != end
            mine.append((kind, inside[0], inside[-1] + 1))
        found.append(schemes.write_tags(mine, len(words)))
    notes = []
    if moved:
        notes.append(f"entities whose borders are moved to those of their words: {moved:,}")
    if lost:
        notes.append(f"entities that overlap another or contain no word, and are left out: {lost:,}")
    return found, [f"{table.source}: {note}." for note in notes]


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

    width = x.shape[1]
    wanted = F.pad(targets, (0, max(0, width - targets.shape[1])), value=_NO_WORD)[:, :width]
    each = F.cross_entropy(x.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=_NO_WORD)
    words = (wanted != _NO_WORD).sum(1).clamp(min=1)
    return each.view(len(x), width).sum(1) / words


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
    recognizes=_recognizes,
    infer_labels=_infer_labels,
    cell_labels=_cell_labels,
    clean=lambda label: label,
    read_targets=_read_targets,
    per_token=True,
    window_targets=_window_targets,
    weight=lambda target: float((target != _NO_WORD).sum()),  # so that all words of a step count the same
    targets=_targets,
    loss=_loss,
    decide=_decide,
    predict=_predict,
    collapsed=_collapsed,
    prior_loss=_prior_loss,
)
