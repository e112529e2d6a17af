"""Ways to damage one file on disk. Knows nothing of what the file means."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

SPARSE = 10 * 2**30
"""Bytes of a file that pretends to be large."""


def flip(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Flip one to eight bits."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Cut the file."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def extend(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Append something."""
    with path.open("ab") as file:
        file.write(draw.choice((b"\n", b" " * 100, b"\0" * 100, b"}", b"{}", draw.randbytes(100), path.read_bytes())))


def zero(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Overwrite a part, or all, with zeros."""
    data = path.read_bytes()
    start = draw.choice((0, draw.randrange(len(data))))
    end = draw.choice((len(data), draw.randint(start, len(data))))
    path.write_bytes(data[:start] + bytes(end - start) + data[end:])


def digit(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Change one digit to another, so that what was JSON still is."""
    data = bytearray(path.read_bytes())
    places = [place for place, one in enumerate(data) if chr(one).isdigit()]
    if places:
        data[draw.choice(places)] = ord(draw.choice("0123456789"))
    path.write_bytes(data)


def noise(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Replace everything with random bytes."""
    path.write_bytes(draw.randbytes(draw.choice((1, 100, path.stat().st_size))))


def swap(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Replace the file with another of the same sort, or else of any sort."""
    path.write_bytes(draw.choice([one for one in others if one != path]).read_bytes())


def empty(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Leave nothing in it."""
    path.write_bytes(b"")


def deep(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Write JSON that is deeper, or has a longer number, than a parser likes."""
    depth = draw.choice((900, 5_000, 200_000))
    texts = ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * 100_000, '{"default": 1e999}')
    path.write_text(draw.choice(texts))


def sparse(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Make it 10 GB long without using the disk."""
    if draw.random() < 0.5:
        path.write_bytes(b"")
    os.truncate(path, SPARSE)


def absent(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Remove it."""
    path.unlink()


def fifo(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Put a named pipe in its place; whoever opens it waits for a writer."""
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Put a folder in its place."""
    path.unlink()
    path.mkdir()
    if draw.random() < 0.5:
        (path / "file").write_text("text")


def loop(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Put a link to itself in its place."""
    path.unlink()
    path.symlink_to(path.name)


def dangling(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Put a link to nothing in its place."""
    path.unlink()
    path.symlink_to("nothing-here")


def device(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Put a link to an endless device in its place."""
    path.unlink()
    path.symlink_to("/dev/zero")


def listening(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Put a socket in its place."""
    path.unlink()
    before = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def unreadable(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Take all permissions away."""
    path.chmod(0)


def parent_is_a_file(path: Path, draw: random.Random, others: Sequence[Path]) -> None:
    """Put a file in the place of its folder."""
    shutil.rmtree(path.parent)
    path.parent.write_text("text")


CONTENT: dict[str, Callable[[Path, random.Random, Sequence[Path]], None]] = {
    "bits flipped": flip,
    "truncated": truncate,
    "extended": extend,
    "zeros": zero,
    "another digit": digit,
    "noise": noise,
    "swapped": swap,
    "empty": empty,
    "deep JSON": deep,
}
PLACE: dict[str, Callable[[Path, random.Random, Sequence[Path]], None]] = {
    "absent": absent,
    "10 GB": sparse,
    "FIFO": fifo,
    "folder": folder,
    "link to itself": loop,
    "dangling link": dangling,
    "link to /dev/zero": device,
    "socket": listening,
    "unreadable": unreadable,
    "a file for its folder": parent_is_a_file,
}
