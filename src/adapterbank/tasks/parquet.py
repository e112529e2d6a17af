"""Parquet files as columns of plain values. Under limits, nothing is decoded before its size is known.

A few bytes of Parquet can stand for many rows, and for the same long text in each of them. The footer is checked first.
Since it may be forged, the rows are then read in batches whose texts stay dictionary-encoded, and a batch is weighed
before its values are made. Numbers whose names the file states (see `class_labels`) are replaced by them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapterbank.errors import DataError
from adapterbank.kinds.values import short
from adapterbank.tasks.class_labels import stored_names, with_names
from adapterbank.tasks.limits import TableBudget

_BATCH = 4096
"""Rows that are decoded at once."""
_VALUE = 64
"""Bytes of a value in memory, besides those of a text."""
_CHUNKS = 1_000_000
"""Column chunks of a file."""
_FOOTER = {"thrift_string_size_limit": 16 << 20, "thrift_container_size_limit": 100_000}
"""Limits of the footer's lists and strings."""


def read_parquet(path: Path, budget: TableBudget, *, named: bool = True) -> dict[str, list[Any]]:
    """Return the columns of a file; without `named`, labels that are numbers stay numbers."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    status = path.stat()
    budget.check_regular(status)
    if status.st_size == 0:
        raise DataError(f"{path} is empty; write the Parquet file again.")
    try:
        # ParquetFile, because read_table would also take columns from folder names such as lang=en.
        if budget.limits is None:
            with ParquetFile(path) as file:
                return _named(dict(file.read().to_pydict()), file, named)
        with ParquetFile(path, **_FOOTER) as file:
            texts = _check_footer(file.metadata, budget)
        with ParquetFile(path, read_dictionary=texts, **_FOOTER) as file:
            return _named(_read_batches(file, budget), file, named)
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError, LookupError) as error:  # odd dates too
        if isinstance(error, MemoryError):
            raise
        reason = short(next(iter(str(error).splitlines()), type(error).__name__), 90)
        raise DataError(f"{path} cannot be read as a Parquet file ({reason}); write it again.") from None


def _named(columns: dict[str, list[Any]], file: Any, named: bool) -> dict[str, list[Any]]:
    for name, words in stored_names(file.schema_arrow).items() if named else ():
        columns[name] = [with_names(value, words) for value in columns[name]]
    return columns


def _check_footer(footer: Any, budget: TableBudget) -> list[str]:
    """Refuse a file that is too large by its own account; return the paths of its columns of texts."""
    budget.check_rows(footer.num_rows)
    budget.check_columns(footer.num_columns)
    leaves = [footer.schema.column(place) for place in range(footer.num_columns)]
    wide = next(
        (leaf for leaf in leaves if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > _VALUE), None
    )
    if wide is not None:
        raise DataError(
            f"{budget.source} has a column of {wide.length} bytes a value, {short(wide.path)!r}; remove it."
        )
    if footer.num_row_groups * footer.num_columns > _CHUNKS:
        raise DataError(f"{budget.source} has {footer.num_row_groups:,} row groups; write it with fewer.")
    groups = (footer.row_group(number) for number in range(footer.num_row_groups))
    chunks = [group.column(place) for group in groups for place in range(footer.num_columns)]
    budget.check_memory(sum(chunk.total_uncompressed_size for chunk in chunks))
    budget.check_memory(_VALUE * sum(chunk.num_values for chunk in chunks))
    return [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]


def _read_batches(file: Any, budget: TableBudget) -> dict[str, list[Any]]:
    names = file.schema_arrow.names
    if len(set(names)) < len(names):
        raise DataError(f"{budget.source} has two columns of one name; give each its own name.")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    rows = 0
    for batch in file.iter_batches(batch_size=_BATCH, use_threads=False):
        rows += batch.num_rows
        budget.check_rows(rows)
        for name, array in zip(names, batch.columns, strict=True):
            budget.add(_size(array, budget))
            columns[name] += (array.dictionary_decode() if hasattr(array, "dictionary") else array).to_pylist()
    return columns


def _size(array: Any, budget: TableBudget) -> int:
    """Return the bytes that the values of an array will take; refuse a text that is too long."""
    import pyarrow.compute as compute
    from pyarrow import types

    kind = array.type
    if hasattr(array, "storage"):
        return _size(array.storage, budget)
    if types.is_dictionary(kind):
        measure = compute.utf8_length if types.is_string(array.dictionary.type) else compute.binary_length
        budget.check_text(compute.max(measure(array.dictionary).take(array.indices)).as_py() or 0)
        size = compute.sum(compute.binary_length(array.dictionary).take(array.indices)).as_py() or 0
        return _VALUE * len(array) + int(size)
    if types.is_struct(kind):
        return _VALUE * len(array) + sum(_size(part, budget) for part in array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_map(kind):
        return _VALUE * len(array) + _size(array.flatten(), budget)
    if kind.num_fields or types.is_string(kind) or types.is_binary(kind):
        raise DataError(f"{budget.source} has a column of the type {short(str(kind))}; write texts, numbers or lists.")
    return _VALUE * len(array)
