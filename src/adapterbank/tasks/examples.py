"""Splits: the rows of a table as the examples of a task, and one split cut into two. It knows no tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from adapterbank.errors import DataError, InputError
from adapterbank.tasks.columns import (
    as_number,
    class_name,
    find_columns,
    find_texts,
    has_no_answer,
    is_missing,
    label_names,
    number_at,
    require_column,
)
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import Table, is_plain_text, listed, read_lines, read_table, short


@dataclass(frozen=True)
class Report:
    """What a reader met on the way."""

    rows: int
    """Rows of the table."""
    empty: int = 0
    """Rows with an empty text: dropped where targets are read, kept for prediction."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""


def read_examples(table: Table, task: Task, *, need_targets: bool = True) -> tuple[Examples, Report]:
    """Return the rows as examples; without targets every row stays, so that answers keep their places."""
    for name in task.text:
        require_column(table, name, "--text")
    parts = [_texts(table, name) for name in task.text]
    empty = [row for row in range(table.rows) if any(not part[row].strip() for part in parts)]
    examples = Examples(parts[0], parts[1] if len(parts) == 2 else None)
    if not need_targets:
        return examples, Report(table.rows, len(empty))
    require_column(table, task.label, "--label")
    if len(empty) == table.rows:
        raise DataError(
            f"{table.source}: every row is empty in {listed(task.text)}; choose another column with --text."
        )
    gone = set(empty)
    keep = [row for row in range(table.rows) if row not in gone]
    notes = [] if not empty else [_dropped(table, empty)]
    _check_filled(table, task, keep)
    targets, remarks = _TARGETS[task.kind](table, task, keep)
    return replace(examples.select(keep), targets=targets), Report(table.rows, len(empty), notes + remarks)


def read_texts(source: str | os.PathLike[str] | TextIO, task: Task) -> Examples:
    """Return texts to predict: of a table, of a .txt file or of an open stream, both a text a line.

    A tab separates the two texts of a line. A table gives the task's own columns, or those with usual names.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _line_examples(_stream_lines(source), task, "standard input")
    if is_plain_text(source):
        return _line_examples(read_lines(source), task, os.fspath(source))
    table = read_table(source)
    if not all(name in table.columns for name in task.text):
        known = task.label if task.label in table.columns else None
        kind = "span" if task.kind == "span" else None
        task = replace(task, text=find_texts(table, label=known, kind=kind, count=len(task.text)))
    return read_examples(table, task, need_targets=False)[0]


def labelled_as(
    table: Table, task: Task, text: str | None = None, text_pair: str | None = None, label: str | None = None
) -> Task:
    """Return the task with the columns that it has in this table: its own, those named, or those with usual names."""
    named = text or text_pair or label
    if not named and all(name in table.columns for name in (*task.text, task.label)):
        return task
    label = label or (task.label if task.label in table.columns else None)
    if not text and all(name in table.columns for name in task.text):
        text, text_pair = task.text[0], (task.text[1] if len(task.text) == 2 else None)
    found = find_columns(table, text, text_pair, label, task.kind)
    if len(found.text) != len(task.text):
        raise DataError(f"{table.source}: {task.name!r} reads {len(task.text)} texts a row; name them with --text.")
    assert found.label is not None
    return replace(task, text=found.text, label=found.label)


def split(examples: Examples, *, task: Task, fraction: float = 0.1, seed: int = 0) -> tuple[Examples, Examples]:
    """Cut off a share for dev: the same for the same seed, and with the same mix of classes."""
    # RandomState, as its stream is frozen for good, unlike `random`'s and the newer generators'.
    from numpy.random import RandomState

    if len(examples) < 2:
        raise DataError(f"There are {len(examples)} rows; 2 or more are needed to split off dev rows.")
    if not 0 < fraction < 1:
        raise InputError(f"The share of dev rows is {fraction}; it must lie between 0 and 1, such as 0.1.")
    draw = RandomState(seed)
    order: list[int] = draw.permutation(len(examples)).tolist()
    size = min(max(1, round(len(examples) * fraction)), len(examples) - 1)
    groups: dict[Any, list[int]] = {}
    classes = examples.targets if task.kind == "classification" else None
    for row in order:
        groups.setdefault(None if classes is None else classes[row], []).append(row)
    shares = _shares([len(group) for group in groups.values()], size)
    dev = [row for group, share in zip(groups.values(), shares, strict=True) for row in group[:share]]
    # Where every class has a single row none can be spared by class, and dev still needs one.
    chosen = set(dev or order[:size])
    return (
        examples.select(row for row in range(len(examples)) if row not in chosen),
        examples.select(sorted(chosen)),
    )


def _shares(sizes: Sequence[int], wanted: int) -> list[int]:
    # Largest remainders: whole shares first, then one more where most is missing; never a group's last row.
    exact = [size * wanted / sum(sizes) for size in sizes]
    most = [size - 1 for size in sizes]
    shares = [min(int(share), cap) for share, cap in zip(exact, most, strict=True)]
    for _ in range(min(wanted, sum(most)) - sum(shares)):
        room = [place for place in range(len(sizes)) if shares[place] < most[place]]
        # Among equals the first, which is a draw too: groups come in the order of the shuffled rows.
        shares[max(room, key=lambda place: exact[place] - shares[place])] += 1
    return shares


def _check_filled(table: Table, task: Task, keep: Sequence[int]) -> None:
    for row in keep:
        value = table.columns[task.label][row]
        # An empty cell is the only way a CSV file can say that none of many labels applies.
        if is_missing(value) and not (task.kind == "multilabel" and isinstance(value, str)):
            raise DataError(f"{table.at(row)}: column {task.label!r} is empty; fill it in or remove the row.")


def _texts(table: Table, name: str) -> list[str]:
    texts = []
    for row, value in enumerate(table.columns[name]):
        if isinstance(value, (list, tuple, dict, set, bytes)):
            raise DataError(
                f"{table.at(row)}: {short(value)} in column {name!r} is no text; choose another with --text."
            )
        text = value if isinstance(value, str) else "" if is_missing(value) else str(value)
        if not text.isascii():
            # JSON can carry half of a surrogate pair, which no tokenizer takes.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        texts.append(text)
    return texts


def _dropped(table: Table, empty: Sequence[int]) -> str:
    rows = "1 row" if len(empty) == 1 else f"{len(empty)} rows"
    return f"{table.source}: dropped {rows} of {table.rows} with an empty text (first: row {empty[0] + 1})."


# --- targets by kind ----------------------------------------------------------------------------------------


def _class_targets(table: Table, task: Task, keep: Sequence[int]) -> tuple[list[Any], list[str]]:
    named = [[class_name(table, task.label, row)] for row in keep]
    places, notes = _places(table, task, keep, named)
    return [place[0] for place in places], notes


def _multilabel_targets(table: Table, task: Task, keep: Sequence[int]) -> tuple[list[Any], list[str]]:
    named = [label_names(table.columns[task.label][row]) for row in keep]
    for row, names in zip(keep, named, strict=True):
        if len(set(names)) < len(names):
            raise DataError(
                f"{table.at(row)}: {short(table.columns[task.label][row])} names a label twice; "
                f"list the names of the labels that apply, not a 0 or 1 for each."
            )
    places, notes = _places(table, task, keep, named)
    return [tuple(sorted(place)) for place in places], notes


def _places(
    table: Table, task: Task, keep: Sequence[int], named: Sequence[Sequence[str]]
) -> tuple[list[list[int]], list[str]]:
    lookup = {name: place for place, name in enumerate(task.labels)}
    notes = []
    numbers = {str(place): place for place in range(len(task.labels))}
    words = all(as_number(name) is None for name in task.labels)
    if words and any(named) and all(name in numbers for names in named for name in names):
        # GLUE and many Parquet files store places, and the names stand beside them.
        lookup = numbers
        notes.append(f"{table.source}: the numbers in {task.label!r} are read as places in: {listed(task.labels)}.")
    pairs = ((row, name) for row, names in zip(keep, named, strict=True) for name in names)
    unseen = [(row, name) for row, name in pairs if name not in lookup]
    if unseen:
        row, name = unseen[0]
        count = len({row for row, _ in unseen})
        raise DataError(
            f"{table.at(row)}: the label {short(name)!r} is not one of the task's {len(task.labels)} labels "
            f"({listed(task.labels)}); {count} of {len(keep)} rows have such a label: correct them, remove "
            f"them, or train with rows that show it."
        )
    return [[lookup[name] for name in names] for names in named], notes


def _number_targets(table: Table, task: Task, keep: Sequence[int]) -> tuple[list[Any], list[str]]:
    return [number_at(table, task.label, row) for row in keep], []


def _span_targets(table: Table, task: Task, keep: Sequence[int]) -> tuple[list[Any], list[str]]:
    contexts, moved = _texts(table, task.text[1]), 0
    targets: list[Any] = []
    for row in keep:
        if has_no_answer(table.columns[task.label][row]):
            targets.append((-1, -1, ("",)))
            continue
        answers, hints = _answers(table, task, row)
        found = [
            (place, place + len(answer), hint is not None and place != hint)
            for answer, hint in zip(answers, hints, strict=True)
            if (place := _nearest(contexts[row], answer, hint or 0)) is not None
        ]
        if not found:
            raise DataError(
                f"{table.at(row)}: the answer {short(answers[0])!r} does not occur in its context, so it is "
                f"no span; correct the row, or state --kind classification if answers are classes."
            )
        start, end, elsewhere = found[0]
        moved += elsewhere
        targets.append((start, end, tuple(answers)))
    share = f"{moved} of {len(keep)} answers are not at their answer_start"
    return targets, [f"{table.source}: {share}; the nearest place was taken."] if moved else []


def _answers(table: Table, task: Task, row: int) -> tuple[list[str], list[int | None]]:
    value: Any = table.columns[task.label][row]
    starts: Any = table.columns.get("answer_start", [None] * table.rows)[row]
    if isinstance(value, dict):
        value, starts = value.get("text"), value.get("answer_start")
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    hints = list(starts) if isinstance(starts, (list, tuple)) else [starts] * len(texts)
    answers = ["" if is_missing(text) else str(text).strip() for text in texts]
    if not answers or not all(answers):
        raise DataError(
            f"{table.at(row)}: the answer is empty; write an empty list for a question without an answer, as SQuAD 2.0 "
            f"does, or remove the row."
        )
    numbers = [as_number(hint) for hint in hints]
    if len(numbers) != len(answers) or any(
        hint is not None and number is None for hint, number in zip(hints, numbers, strict=True)
    ):
        raise DataError(
            f"{table.at(row)}: answer_start is {short(starts)}; give one place for each of the "
            f"{len(answers)} answers, or leave it out."
        )
    return answers, [None if number is None else int(number) for number in numbers]


def _nearest(context: str, answer: str, hint: int) -> int | None:
    if context.startswith(answer, max(0, hint)):
        return max(0, hint)
    before, after = context.rfind(answer, 0, max(0, hint) + len(answer)), context.find(answer, max(0, hint))
    found = [place for place in (before, after) if place >= 0]
    return min(found, key=lambda place: abs(place - hint), default=None)


_TARGETS: dict[str, Callable[[Table, Task, Sequence[int]], tuple[list[Any], list[str]]]] = {
    "classification": _class_targets,
    "multilabel": _multilabel_targets,
    "regression": _number_targets,
    "span": _span_targets,
}


# --- lines --------------------------------------------------------------------------------------------------


def _stream_lines(stream: TextIO) -> list[str]:
    try:
        lines = [line.removesuffix("\n").removesuffix("\r") for line in stream]
    except UnicodeDecodeError as error:
        raise DataError(f"Standard input is not UTF-8 ({error.reason}); convert it by iconv.") from None
    if not lines:
        raise DataError("Standard input is empty; pipe in a text a line.")
    return [lines[0].removeprefix("\ufeff"), *lines[1:]]


def _line_examples(lines: Iterable[str], task: Task, source: str) -> Examples:
    if len(task.text) == 1:
        return Examples(list(lines))
    halves = [line.split("\t") for line in lines]
    for number, parts in enumerate(halves, 1):
        if len(parts) != 2:
            raise DataError(
                f"{source}, line {number}: {len(parts) - 1} tabs where the task {task.name!r} needs exactly "
                f"one, between {task.text[0]!r} and {task.text[1]!r}."
            )
    return Examples([first for first, _ in halves], [second for _, second in halves])
