"""Files of any size through the tasks of a bank: rows in, the same rows with answers out. Knows no terminal."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from adapterbank.api.handle import BankHandle
from adapterbank.errors import BankError, DataError, InputError, PackageDamaged, UnknownName
from adapterbank.inference.answer_columns import ERROR, AnswerColumns, sample_of
from adapterbank.inference.explain import check_explainable, explained
from adapterbank.inference.predictions import check_abstain
from adapterbank.inference.task_rows import by_task, in_order, table_rows
from adapterbank.kinds.table import KINDS
from adapterbank.kinds.values import is_missing, listed, short
from adapterbank.kinds.words import Words, joined
from adapterbank.storage.files import check_output
from adapterbank.tasks.columns import require_column
from adapterbank.tasks.examples import located, read_examples
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.streams import RowStream, as_table, chunks, format_of, open_stream
from adapterbank.tasks.tables import Table
from adapterbank.tasks.text_rows import StreamRow
from adapterbank.tasks.writers import ENCODERS, Compressed, OutputColumn, OutputLayout, RowEncoder, value_type

if TYPE_CHECKING:
    from adapterbank.api.opened import OpenBank

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class FileOptions:
    """How a file is read, answered and written; see `OpenBank.predict_file`."""

    text: str | None = None
    text_pair: str | None = None
    task_column: str | None = None
    form: str | None = None
    output_form: str | None = None
    keep_columns: bool = True
    best: int = 0
    abstain: float = 0.0
    explain: bool = False


@dataclass
class FileReport:
    """What became of a file."""

    rows: int = 0
    """Rows that were written."""
    failed: int = 0
    """Rows among them that have a problem instead of an answer."""


@dataclass(frozen=True)
class FileWatch:
    """What `predict_file` calls while it works."""

    progress: Callable[[int, int, int | None], None] = lambda rows, done, total: None
    """Rows written, how much of the file was read, and its size in the same unit, if that is known."""
    problem: Callable[[str], None] = lambda text: None
    """A row that has no answer: where it is, and why."""
    note: Callable[[str], None] = lambda text: None
    """Anything else that the user should know."""


def predict_file(
    bank: BankHandle,
    tasks: Sequence[str],
    source: str | os.PathLike[str] | BinaryIO,
    output: str | os.PathLike[str] | BinaryIO,
    options: FileOptions,
    watch: FileWatch,
    report: FileReport,
) -> FileReport:
    """Answer the rows of a file, chunk by chunk; `report` counts them while they are written."""
    form = output_format(output, options.output_form)
    check_output(source, output)
    if options.task_column is not None and form != "jsonl":
        raise InputError(f"Rows of different tasks have different columns, which {form} cannot have; write jsonl.")
    if options.explain and form != "jsonl":
        raise InputError(f"An explanation has a line for each word, which {form} cannot hold; write jsonl.")
    specs = {name: bank._spec(name) for name in tasks}
    for spec in specs.values():
        check_abstain(spec, options.abstain)
        if options.explain:
            check_explainable(spec)
    with open_stream(source, options.form, _line_columns(specs)) as stream:
        for note in stream.text.notes if stream.text else ():
            watch.note(note)
        parts = chunks(stream.rows)
        first = next(parts, None)
        if first is None:
            names = f"columns ({listed(stream.columns)})" if stream.columns else "nothing"
            raise DataError(f"{stream.source} has {names} but no rows; add some.")
        if stream.form == "lines" and all(_looks_like_json(row) for row in first):
            watch.note(f"{stream.source} looks like JSON but is read as plain lines; add --format jsonl.")
        answers = _Answers(bank, specs, stream, first, options, table=form != "jsonl")
        if answers.note:
            watch.note(answers.note)
        encoder = ENCODERS[form](answers.layout(first, form))
        with open_output(output, encoder) as write:
            for chunk in chain([first], parts):
                rows, problems = answers.answer(chunk)
                write(rows)
                report.rows += len(rows)
                report.failed += len(problems)
                for problem in problems:
                    watch.problem(problem)
                watch.progress(report.rows, stream.position(), stream.total)
        if answers.lost and form != "jsonl":
            watch.note(f"Columns that only later rows have are not written: {listed(answers.lost)}; write .jsonl.")
    return report


def predict_texts(
    bank: OpenBank,
    tasks: Sequence[str],
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    output: str | os.PathLike[str] | BinaryIO,
    options: FileOptions,
) -> FileReport:
    """Write the answers to texts as `predict_file` writes those to the rows of a file."""
    form = output_format(output, options.output_form)
    given: dict[str, Any] = {"best": options.best, "abstain": options.abstain, "explain": options.explain}
    found = [[one.to_json() for one in bank.predict(task, texts, pairs, **given)] for task in tasks]
    residents = [bank.engine.residents[bank._load_task(task)] for task in tasks]
    samples = {task: sample_of(own, one[0]) for task, own, one in zip(tasks, residents, found, strict=True)}
    columns = AnswerColumns(samples, (), table=form != "jsonl")
    with open_output(output, ENCODERS[form](OutputLayout(columns.columns()))) as write:
        write([columns.of(tasks, answers) for answers in zip(*found, strict=True)])
    return FileReport(len(texts))


def output_format(output: str | os.PathLike[str] | BinaryIO, named: str | None) -> str:
    """Return the format to write: the one named, that of the file's extension, or JSON lines."""
    path = Path(output) if isinstance(output, (str, os.PathLike)) else None
    form = named or ("jsonl" if path is None or not path.suffix else format_of(path))
    if form not in ENCODERS:
        what = "a format that can be written" if form else "a name with the extension of a format that can be written"
        raise UnknownName(form or str(path), what, list(ENCODERS))
    return form


def _looks_like_json(row: StreamRow) -> bool:
    text = str(next(iter(row.values.values())))
    return text.startswith("{") and text.endswith("}")


def _line_columns(specs: Mapping[str, Task]) -> Sequence[str]:
    """Return the names of the texts on a plain line, which must be as many for all tasks."""
    widths = {len(spec.text): spec.text for spec in specs.values()}
    return next(iter(widths.values())) if len(widths) == 1 else ("text",)


class _Answers:
    """Answers chunks of one file."""

    def __init__(
        self,
        bank: BankHandle,
        specs: Mapping[str, Task],
        stream: RowStream,
        first: Sequence[StreamRow],
        options: FileOptions,
        *,
        table: bool,
    ) -> None:
        self._bank, self._stream, self._options = bank, stream, options
        self._known = frozenset(stream.columns or (name for row in first for name in row.values))
        self.lost: dict[str, None] = {}
        sample = as_table([row for row in first if not row.problem] or first, stream.source)
        if options.task_column is not None:
            require_column(sample, options.task_column, "--task-column")
            specs = {}
        self._specs = {name: located(sample, spec, options.text, options.text_pair) for name, spec in specs.items()}
        self._loaded = {name: bank._load_task(name) for name in specs}
        samples = {name: self._sample(name, sample) for name in self._specs}
        taken = self._known if options.keep_columns else ()
        self._columns = AnswerColumns(samples, taken, table=table)
        self.note = ""
        if clash := sorted(self._columns.names & set(taken)):
            raise DataError(f"{stream.source} has a column {clash[0]!r}, as the answers have; rename it.")
        if self._columns.prefixed and len(specs) == 1:
            name = min(self._columns.names)
            self.note = f"The file has columns that are named like the answers; those are {name} and so on."

    def _sample(self, task: str, rows: Table) -> dict[str, Any]:
        """Return an answer of the task, which shows its fields; a text of words if such texts are in the rows."""
        names = self._specs[task].text
        words = any(isinstance(joined(value), Words) for value in rows.columns.get(names[0], ()))
        given = Examples([Words.of(["text"]) if words else "text"], ["text"] if len(names) == 2 else None)
        ((found,),) = self._bank.engine.predict_json([(self._loaded[task], given)])
        return sample_of(self._bank.engine.residents[self._loaded[task]], found)

    def layout(self, first: Sequence[StreamRow], form: str) -> OutputLayout:
        """Return the columns to write: those of the file, then those of the answers."""
        own: list[OutputColumn] = []
        if self._options.keep_columns:
            table = as_table([StreamRow(0, dict.fromkeys(self._stream.columns or ())), *first], "")
            own = [OutputColumn(name, value_type(values[1:])) for name, values in table.columns.items()]
        text = self._stream.text
        delimiter = text.delimiter if text and self._stream.form == form else ","
        schema = self._stream.schema if self._options.keep_columns else None
        return OutputLayout([*own, *self._columns.columns()], delimiter, schema)

    def answer(self, chunk: Sequence[StreamRow]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the rows to write and, for those without an answer, where they are and why."""
        checked = [row if row.problem else row._replace(problem=self._problem(row)) for row in chunk]
        good = [row for row in checked if not row.problem]
        answers = iter(self._predicted(good))
        rows, problems = [], []
        for row in checked:
            found = {ERROR: row.problem} if row.problem else next(answers)
            if ERROR in found:
                problems.append(f"{self._stream.at(row.number)}: {found[ERROR]}.")
                found = {self._columns.error: problems[-1]}
            rows.append({**row.values, **found} if self._options.keep_columns else found)
        return rows, problems

    def _problem(self, row: StreamRow) -> str:
        """Return why a row that was read cannot be answered; empty if nothing is known to prevent it."""
        if not self._known.issuperset(row.values):
            new = [name for name in row.values if name not in self._known]
            self.lost |= dict.fromkeys(new)
            if self._options.keep_columns and (clash := [name for name in new if name in self._columns.names]):
                return f"it has a column {clash[0]!r}, as the answers have, which earlier rows lack; rename it"
        for spec in self._specs.values():
            for name in spec.text:
                if name in self._known and name not in row.values:
                    return f"it has no {name!r}"
                value = row.values.get(name)
                value = joined(value) if KINDS[spec.kind].words else value
                if isinstance(value, (list, tuple, dict, set, bytes)):
                    return f"{short(value)} in column {name!r} is not a text; choose another with --text-column"
        return ""

    def _predicted(self, rows: Sequence[StreamRow]) -> list[dict[str, Any]]:
        """Return the answers of rows, or the problem of those that make the others fail."""
        if not rows:
            return []
        try:
            return self._mixed(rows) if self._options.task_column is not None else self._together(rows)
        except PackageDamaged:
            raise
        except (InputError, BankError) as error:
            if len(rows) == 1:
                source = self._stream.source
                return [{ERROR: str(error).removeprefix(f"{source}, row 1: ").removesuffix(".")}]
            half = len(rows) // 2
            return [*self._predicted(rows[:half]), *self._predicted(rows[half:])]

    def _together(self, rows: Sequence[StreamRow]) -> list[dict[str, Any]]:
        table = as_table(rows, self._stream.source)
        read: dict[tuple[str, ...], Examples] = {}
        for spec in self._specs.values():
            if spec.text not in read:
                read[spec.text] = read_examples(table, spec, need_targets=False)[0]
        requests = [(self._loaded[name], read[spec.text]) for name, spec in self._specs.items()]
        found = self._answered(requests)
        tasks = list(self._specs)
        return [self._columns.of(tasks, answers) for answers in zip(*found, strict=True)]

    def _answered(self, requests: Sequence[tuple[str | None, Examples]]) -> list[list[dict[str, Any]]]:
        """Return the predictions for requests, as the options want them."""
        engine, options = self._bank.engine, self._options
        if not options.explain:
            return engine.predict_json(requests, options.best, options.abstain)
        predict = partial(engine.predict, best=options.best, abstain=options.abstain)
        return [[one.to_json() for one in found] for found in explained(predict, requests)]

    def _mixed(self, rows: Sequence[StreamRow]) -> list[dict[str, Any]]:
        """Answer rows that name their tasks; a row without one is embedded by the bare encoder."""
        options = self._options
        table = as_table(rows, self._stream.source)
        column = table.columns.pop(options.task_column or "", [None] * len(rows))
        names = [None if is_missing(name) else str(name) for name in column]
        groups = by_task(names, table_rows(table, names, self._bank._spec, options.text, options.text_pair), None)
        requests = [self._bank._request(group) for group in groups]
        found = in_order(groups, self._answered(requests))
        named = not options.keep_columns
        return [{**({"task": name} if named else {}), **one} for name, one in zip(names, found, strict=True)]


# --- output -------------------------------------------------------------------------------------------------


@contextmanager
def open_output(
    output: str | os.PathLike[str] | BinaryIO, encoder: RowEncoder
) -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    """Return a function that writes rows; each chunk is written whole or not at all, also on Ctrl-C.

    A file has its name once it is complete. Until then, and if the work is stopped, its rows are in NAME.part.
    """
    if not isinstance(output, (str, os.PathLike)):
        with _encoded(encoder, _to_stream(output)) as write:
            yield write
        return
    path = Path(output)
    part = part_of(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.suffix.lower() == ".gz":
        encoder = Compressed(encoder)
    done = 0

    def to_file(data: bytes) -> None:
        nonlocal done
        file.write(data)
        done += len(data)

    try:
        with part.open("wb", buffering=0) as file:
            try:
                with _encoded(encoder, to_file) as write:
                    yield write
            except OSError:  # such as a full disk: leave whole rows
                file.truncate(done)
                raise
        part.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the path that the user gave
        raise
    finally:
        with suppress(OSError):
            if not done:
                part.unlink()


def part_of(path: Path) -> Path:
    """Return the name of a file that is not complete yet."""
    return path.with_name(f"{path.name}.part")


@contextmanager
def _encoded(
    encoder: RowEncoder, write: Callable[[bytes], None]
) -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    """Return a function that encodes and writes rows; the end of the file is written too if the work is stopped."""
    written = False

    def rows_out(rows: Sequence[Mapping[str, Any]]) -> None:
        nonlocal written
        with _uninterrupted():
            written = True
            write(encoder.encode(rows))

    try:
        yield rows_out
    except KeyboardInterrupt:
        if written:
            write(encoder.finish())
        raise
    with _uninterrupted():
        write(encoder.finish())


def _to_stream(stream: BinaryIO) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return write


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until rows are written; a second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    caught: list[int] = []

    def remember(number: int, frame: Any) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, remember) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt
