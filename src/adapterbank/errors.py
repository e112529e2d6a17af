"""The tree of errors: everything this library raises on purpose. It knows nothing else of the library.

    AdapterbankError            any mistake that has a plain remedy; the shell prints its one sentence
    ├── InputError              what the caller gave cannot be used
    │   ├── ConfigError         an option is wrong; lists every mistake at once
    │   ├── DataError           a data file or its rows cannot be used
    │   └── UnknownName         a name that is not in a table; lists the choices
    ├── BackboneError           an encoder cannot be found, read or trusted
    ├── BankError               a bank or a package cannot be used
    │   ├── PackageDamaged      a checksum fails
    │   └── BackboneMismatch    a package or bank belongs to another encoder
    ├── ServiceError            a server refuses, or cannot be reached
    ├── StorageError            the disk is full or refuses
    └── TrainingError           a run cannot go on (exit status 1: the input may be fine)

A message is one sentence or two: what is wrong with the value named, and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AdapterbankError(Exception):
    """Any mistake that has a plain remedy."""

    exit_code = 2


class InputError(AdapterbankError):
    """What the caller gave cannot be used."""


class ConfigError(InputError):
    """One or more options are wrong; `mistakes` has a sentence for each."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class DataError(InputError):
    """A data file or its rows cannot be used."""


class UnknownName(InputError):
    """A name that is not in a table: says which names are, nearest first."""

    def __init__(self, name: str, what: str, choices: Iterable[str], see: str = "") -> None:
        self.name, self.choices = name, tuple(choices)
        near = difflib.get_close_matches(name, self.choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(self.choices) or "none"
        there = "There are for example" if see and self.choices else "There are"  # who says where to see all lists few
        where = f" See: {see}" if see else ""
        super().__init__(f"{name!r} is not {what}.{hint} {there}: {listed}.{where}")


class BackboneError(AdapterbankError):
    """An encoder cannot be found, read or trusted."""


class BankError(AdapterbankError):
    """A bank or a package cannot be used."""


class PackageDamaged(BankError):
    """A package's files are not those that were written: a checksum fails."""


class BackboneMismatch(BankError):
    """A package or a bank belongs to another encoder."""


class ServiceError(AdapterbankError):
    """A server refuses, or cannot be reached; `code` is the server's own word for it, empty where it gave none."""

    def __init__(self, message: str, code: str = "", status: int = 0, request_id: str = "") -> None:
        self.code, self.status, self.request_id = code, status, request_id
        super().__init__(message)


class StorageError(AdapterbankError):
    """The disk is full or refuses to write."""


class TrainingError(AdapterbankError):
    """A run cannot go on, though its input may be fine."""

    exit_code = 1


class SlowerWarning(UserWarning):
    """Something that only makes things faster is not to be had here."""
