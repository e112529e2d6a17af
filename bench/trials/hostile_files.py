"""Data files and studies that are made to cost more than they weigh. Each function writes one and returns its path."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Draw = random.Random
LAUGHS = 9
"""Levels of aliases that multiply tenfold each."""


# --- Parquet ----------------------------------------------------------------------------------------------


def _parquet(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "upload.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def dictionary_bomb(folder: Path, draw: Draw) -> Path:
    """One long string, which every row names: a kilobyte that decodes to gigabytes."""
    rows = draw.choice((2_000, 40_000))
    text = pyarrow.array(["x" * draw.choice((100_000, 1_000_000))])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), text)
    return _parquet(folder, {"text": column, "label": [0, 1] * (rows // 2)}, compression="zstd")


def many_rows(folder: Path, draw: Draw) -> Path:
    """Millions of equal rows."""
    rows = draw.choice((1_000_000, 10_000_000, 30_000_000))
    values = pyarrow.repeat("a", rows).dictionary_encode() if draw.random() < 0.5 else pyarrow.nulls(rows)
    return _parquet(folder, {"text": values, "label": pyarrow.repeat(1, rows)}, row_group_size=rows)


def many_columns(folder: Path, draw: Draw) -> Path:
    """Thousands of columns."""
    return _parquet(folder, {f"column{n}": [1] for n in range(draw.choice((500, 5_000, 20_000)))})


def long_lists(folder: Path, draw: Draw) -> Path:
    """Lists of many empty strings, which are nothing on disk and a pointer each in memory."""
    value = [""] * draw.choice((100_000, 1_000_000))
    column = pyarrow.array([value] * 10)
    return _parquet(folder, {"text": column, "label": [0, 1] * 5})


def deep_lists(folder: Path, draw: Draw) -> Path:
    """A list of lists of lists."""
    value: Any = ["a"]
    for _ in range(draw.choice((5, 50, 90))):
        value = [value]
    return _parquet(folder, {"text": pyarrow.array([value, value]), "label": [0, 1]})


def odd_types(folder: Path, draw: Draw) -> Path:
    """Columns that are no text."""
    texts = draw.choice(
        (
            pyarrow.array([b"\xff\xfe", b"\x00"]),
            pyarrow.array([10**12, -(10**12)], pyarrow.timestamp("s")),
            pyarrow.array([{"a": 1}, {"a": None}]),
            pyarrow.array([2**62, None]),
            pyarrow.array([float("nan"), float("inf")]),
            pyarrow.array([[("a", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        )
    )
    return _parquet(folder, {"text": texts, draw.choice(("label", "text2", "\x00", "")): [0, 1]})


def forged_parquet(folder: Path, draw: Draw) -> Path:
    """A file whose metadata lies: bytes of the footer, its length, or the pages are changed."""
    path = _parquet(folder, {"text": ["a good film", "a bad film"] * 50, "label": [0, 1] * 50})
    data = bytearray(path.read_bytes())
    footer = int.from_bytes(data[-8:-4], "little")
    for _ in range(draw.choice((1, 1, 2, 20))):
        place = draw.choice((draw.randrange(len(data)), len(data) - 8 - draw.randrange(footer), len(data) - 8))
        data[place] = draw.choice((0, 255, 127, 128, draw.randrange(256)))
    path.write_bytes(draw.choice((bytes(data), bytes(data[: draw.randrange(len(data))]) + b"PAR1", bytes(data))))
    return path


# --- text formats -----------------------------------------------------------------------------------------


def _text(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def wide_csv(folder: Path, draw: Draw) -> Path:
    """A header of up to a million names, equal or not."""
    count = draw.choice((10_000, 1_000_000))
    names = ",".join(f"c{n}" for n in range(count))
    return _text(folder, "upload.csv", draw.choice((names, "a," * count)) + "\n" + "1," * count + "\n")


def long_field(folder: Path, draw: Draw) -> Path:
    """A field of megabytes, closed or not."""
    end = draw.choice(('",1\n', "", '"\n'))
    return _text(folder, draw.choice(("upload.csv", "upload.tsv")), 'text,label\n"' + "x" * 20_000_000 + end)


def many_lines(folder: Path, draw: Draw) -> Path:
    """Millions of short or empty rows."""
    line = draw.choice(("a,1\n", "\n", ",\n", "a,1,2,3\n", '"",""\n'))
    return _text(folder, "upload.csv", "text,label\n" + line * draw.choice((200_000, 5_000_000)))


def odd_bytes(folder: Path, draw: Draw) -> Path:
    """Bytes that are no UTF-8, or should not be in a text."""
    text = "text,label\na good film,1\na bad film,0\n" * 20
    kinds = (text.encode("utf-16"), text.encode().replace(b"good", b"\xff\xfe"), text.replace("film", "f\0lm").encode())
    more = (draw.randbytes(10_000), b"\0" * 100_000, b"", b"\xef\xbb\xbf", b"\r" * 1000, b"text,label")
    name = draw.choice(("upload.csv", "upload.tsv", "upload.jsonl", "upload.json", "upload.parquet", "upload.csv.gz"))
    return _text(folder, name, draw.choice((*kinds, *more)))


def deep_json(folder: Path, draw: Draw) -> Path:
    """JSON that is nested deeper than a parser likes."""
    depth = draw.choice((500, 5_000, 1_000_000))
    inner = draw.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth))
    line = '{"text": ' + inner + ', "label": 1}'
    return _text(folder, draw.choice(("upload.jsonl", "upload.json")), draw.choice((line, line + "\n" + line, inner)))


def wide_csv_of_blanks(folder: Path, draw: Draw) -> Path:
    """A header of nothing but separators, or a row of them below two names."""
    count = draw.choice((5_000, 390_000, 3_900_000))
    start = draw.choice(("", "text,label\n", "text,label\na,1\n", '"'))
    mark, name = draw.choice(((",", "upload.csv"), ("\t", "upload.tsv")))
    return _text(folder, name, start.replace(",", mark) + mark * count + "\n1\n")


def late_keys(folder: Path, draw: Draw) -> Path:
    """Many small rows and then one with many new keys, each of which stands for a value in every row before."""
    rows, keys = draw.choice((1_000, 99_000)), draw.choice((90, 900, 9_000))
    last = json.dumps({f"k{number}": 1 for number in range(keys)})
    lines = ['{"text": "a"}'] * rows + [last]
    if draw.random() < 0.5:
        return _text(folder, "upload.jsonl", "\n".join(lines))
    return _text(folder, "upload.json", f"[{','.join(lines)}]")


def long_keys(folder: Path, draw: Draw) -> Path:
    """Keys of many characters, another one on every line."""
    key = draw.choice(("x", "é", "\U0001f600")) * draw.choice((1_000, 90_000, 390_000))
    return _text(folder, "upload.jsonl", "".join(f'{{"{number}{key}": 1}}\n' for number in range(100)))


def dense_json(folder: Path, draw: Draw) -> Path:
    """A list of values that take many times as much memory as their text."""
    part = draw.choice(("{}", "[]", "300", "1.5", '"ab"', '{"a":1}', '{"text":"a","label":1}', '{"a":{}}', '{"":[]}'))
    values = ",".join([part] * draw.choice((50_000, 500_000, 5_000_000)))
    squad = f'[{{"paragraphs": [{{"context": "x", "qas": [{values}]}}]}}]'
    return _text(folder, "upload.json", draw.choice((f"[{values}]", f'[{{"text": [{values}]}}]', squad)))


def wide_characters(folder: Path, draw: Draw) -> Path:
    """Plain letters and one character that makes each of them as wide as itself."""
    line = "x" * draw.choice((10, 9_999)) + ",1\n"
    text = "text,label\n" + line * (draw.choice((1, 20, 60)) * 1_000_000 // len(line)) + draw.choice("é中\U0001f600")
    return _text(folder, "upload.csv", text + ",0\n")


def pipe(folder: Path, draw: Draw) -> Path:
    """A pipe that nobody writes to, or a link to a device without end."""
    path = folder / draw.choice(("upload.csv", "upload.jsonl", "upload.json", "upload.csv.gz", "upload.parquet"))
    if draw.random() < 0.5:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


def wide_json(folder: Path, draw: Draw) -> Path:
    """Objects of many keys, or a new key on every line."""
    if draw.random() < 0.5:
        return _text(folder, "upload.jsonl", json.dumps({f"k{n}": n for n in range(200_000)}) + "\n")
    return _text(folder, "upload.jsonl", "".join(f'{{"text": "a", "k{n}": 1}}\n' for n in range(50_000)))


def odd_json(folder: Path, draw: Draw) -> Path:
    """Numbers and strings at the edge of JSON."""
    values = (
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "9" * 100_000,
        '"\\ud800"',
        '"\\u0000"',
        "null",
        "[]",
        "{}",
        "true",
        '"',
    )
    line = f'{{"text": {draw.choice(values)}, "label": {draw.choice(values)}}}\n'
    return _text(folder, "upload.jsonl", line * draw.choice((1, 20)))


def gzip_bomb(folder: Path, draw: Draw) -> Path:
    """Megabytes in a kilobyte, as many members as it takes."""
    part = gzip.compress(draw.choice((b"a,1\n", b"\0", b"x", b'{"text": "a", "label": 1}\n')) * 2_000_000)
    name = draw.choice(("upload.csv.gz", "upload.jsonl.gz", "upload.tsv.gz"))
    if draw.random() < 0.2:  # members of nothing
        return _text(folder, name, gzip.compress(b"text,label\na,1\n") + gzip.compress(b"") * 200_000)
    return _text(folder, name, gzip.compress(b"text,label\n") + part * draw.choice((1, 20, 100)))


DATA: dict[str, Callable[[Path, Draw], Path]] = {
    "a Parquet dictionary bomb": dictionary_bomb,
    "Parquet of many rows": many_rows,
    "Parquet of many columns": many_columns,
    "Parquet of long lists": long_lists,
    "Parquet of deep lists": deep_lists,
    "Parquet of odd types": odd_types,
    "Parquet with forged metadata": forged_parquet,
    "CSV of many columns": wide_csv,
    "CSV of blank columns": wide_csv_of_blanks,
    "JSON of late keys": late_keys,
    "JSON of long keys": long_keys,
    "dense JSON": dense_json,
    "text of wide characters": wide_characters,
    "a pipe or a device": pipe,
    "CSV with a huge field": long_field,
    "CSV of many rows": many_lines,
    "odd bytes": odd_bytes,
    "deep JSON": deep_json,
    "wide JSON": wide_json,
    "odd JSON": odd_json,
    "a gzip bomb": gzip_bomb,
}

# --- studies ----------------------------------------------------------------------------------------------


def laughs(draw: Draw) -> str:
    """Aliases that multiply."""
    opening, closing = draw.choice((("[", "]"), ("{a: ", "}")))
    lines = ["a0: &a0 [x, x]"]
    for level in range(1, draw.choice((3, LAUGHS, 40))):
        inner = ", ".join([f"*a{level - 1}"] * (10 if opening == "[" else 1))
        lines.append(f"a{level}: &a{level} {opening}{inner}{closing}")
    return "\n".join([*lines, f"size: *a{len(lines) - 1}", "task: x"])


def selves(draw: Draw) -> str:
    """Values that contain themselves."""
    return draw.choice(
        ("size: &a [*a]", "size: &a {b: *a}", "blocks: &a [{blocks: *a}]", "&a [*a, *a]", "<<: &a {<<: *a}", "a: *a")
    )


def odd_scalars(draw: Draw) -> str:
    """Values that look like dates, numbers or tags and are none."""
    values = ("2024-13-45", "2024-01-01", "0b_", "0x_", "!!float abc", "!!int x", "!!binary x", "!!timestamp x", ".nan")
    values += ("1e400", "-.inf", "1_000", "0o17", "1:30:00", "!!python/object:os.system x", "!!set {a, b}", "!!null x")
    values += ("'" + "9" * 5000 + "'", "9" * 5000, "~", "yes", "!x y", "? x", "|\n  text", "\x07", "\ud7ff", "1e308")
    names = (
        "task",
        "epochs",
        "lr",
        "size",
        "seeds",
        "method",
        "batch",
        "limit",
        "patience",
        "blocks",
        "select",
        "train",
    )
    return "\n".join(f"{name}: {draw.choice(values)}" for name in draw.sample(names, draw.choice((1, 2, 4))))


def deep_yaml(draw: Draw) -> str:
    """Nesting."""
    depth = draw.choice((50, 1_000, 100_000))
    block = "\n".join(" " * level + "a:" for level in range(min(depth, 1_000)))
    return draw.choice(
        (f"size: {'[' * depth}", "size: " + "[" * depth + "]" * depth, "{a: " * depth, block, "- " * depth)
    )


def explosive(draw: Draw) -> str:
    """Grids of more runs than there are atoms."""
    names = (
        "lr",
        "epochs",
        "size",
        "batch",
        "warmup",
        "weight_decay",
        "dropout",
        "seed",
        "sigma",
        "clip",
        "max_length",
    )
    lists = "\n".join(f"{name}: [{', '.join(str(n) for n in range(1, 101))}]" for name in names)
    return draw.choice((f"task: x\ntrain: x.csv\n{lists}", "task: x\nseeds: 1000000000", f"task: [{'x, ' * 100_000}]"))


def big_yaml(draw: Draw) -> str:
    """Megabytes of options."""
    line = draw.choice(("a{n}: 1", "- x", "# nothing", "a: 1", "task: [x, y]"))
    return "\n".join(line.replace("{n}", str(n)) for n in range(draw.choice((10_000, 300_000))))


STUDIES: dict[str, Callable[[Draw], str]] = {
    "a study of multiplying aliases": laughs,
    "a study that contains itself": selves,
    "a study of odd scalars": odd_scalars,
    "a deep study": deep_yaml,
    "an explosive study": explosive,
    "a long study": big_yaml,
}
