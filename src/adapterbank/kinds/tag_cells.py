"""Cells of tags: lists of tags beside lists of words, or spans of characters, to the tag of each word of a row.

Tags of a scheme (`schemes`) become IOB2, and what was changed or left out is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.errors import DataError
from adapterbank.kinds import schemes
from adapterbank.kinds.labels import in_order, is_list_text, items_of, label_name
from adapterbank.kinds.values import as_number, as_text, is_missing, listed, short
from adapterbank.kinds.words import Span, Words, joined, word_spans
from adapterbank.metrics import OUTSIDE, Entity, entities, marks_entities

if TYPE_CHECKING:
    from adapterbank.tasks.columns import Columns
    from adapterbank.tasks.spec import Task
    from adapterbank.tasks.tables import Table

WORD_COLUMNS = ("tokens", "words")
"""Usual names of a column whose cells are lists of words."""
_STARTS, _ENDS, _NAMES = ("start", "start_offset"), ("end", "end_offset"), ("label", "type", "entity_group", "tag")


def _is_span(item: Any) -> bool:
    """Return whether an item of a cell is a stretch of characters with a label."""
    if isinstance(item, Mapping):
        return any(name in item for name in _STARTS) and any(name in item for name in _ENDS)
    return isinstance(item, (list, tuple)) and len(item) == 3 and as_number(item[0]) is not None


def recognizes(columns: Columns, values: Sequence[Any]) -> bool:
    """Return whether the cells are lists of spans, or lists beside lists of words; CSV has lists as text."""
    if not all(isinstance(value, (list, tuple)) or is_list_text(value) for value in values):
        return False
    has_words = columns.text[0].strip().lower() in WORD_COLUMNS
    return _has_spans(values) or (has_words and any(_items(value) for value in values))


def _items(value: Any) -> list[Any]:
    return items_of(value) if is_list_text(value) else list(value) if isinstance(value, (list, tuple)) else [value]


def _has_spans(values: Iterable[Any]) -> bool:
    return any(_is_span(item) for value in values if isinstance(value, (list, tuple)) for item in value)


def cell_labels(value: Any) -> list[str]:
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


def infer_labels(table: Table, column: str, rows: Sequence[int]) -> tuple[str, ...]:
    """Return O and B and I of every type in order of appearance, or the plain tags; see `Kind.infer_labels`."""
    cells = [table.columns[column][row] for row in rows if not is_missing(table.columns[column][row])]
    if _has_spans(cells):
        return _entity_labels(label for cell in cells for label in cell_labels(cell))
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


def read_targets(table: Table, task: Task, rows: Sequence[int]) -> tuple[list[Any], list[str]]:
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
