"""The exception hierarchy: everything that this library raises on purpose. Knows nothing else of the library.

    AdapterbankError            any error with a clear remedy; the shell prints its message
    ├── InputError              an argument or a file cannot be used
    │   ├── ArrayError          an array given to the scikit-learn estimator cannot be used; also a ValueError
    │   ├── ConfigError         an option is wrong; lists every mistake at once
    │   ├── DataError           a data file or its rows cannot be used
    │   └── UnknownName         a name is not in a table; lists the choices
    ├── BackboneError           an encoder cannot be found, read or trusted
    ├── BankError               a bank or a package cannot be used
    │   ├── PackageDamaged      a checksum fails
    │   ├── PackageRequired     others stand on a package that is to be removed
    │   └── BackboneMismatch    a package or bank belongs to another encoder
    ├── ServiceError            a server refuses a request, or cannot be reached
    ├── StorageError            the disk is full or cannot be written
    └── TrainingError           a run fails (exit status 1: its input may be valid)

A message is one or two sentences: the wrong value, why it is wrong, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AdapterbankError(Exception):
    """Any error with a clear remedy."""

    exit_code = 2


class InputError(AdapterbankError):
    """An argument or a file cannot be used."""


class ArrayError(InputError, ValueError):
    """An array given to the scikit-learn estimator cannot be used; scikit-learn expects a `ValueError`."""


class ConfigError(InputError):
    """One or more options are wrong; `mistakes` has a sentence for each."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class DataError(InputError):
    """A data file or its rows cannot be used."""


class UnknownName(InputError):
    """A name is not in a table; the message lists the choices and suggests the nearest."""

    def __init__(self, name: str, what: str, choices: Iterable[str], see: str = "") -> None:
        self.name, self.choices = name, tuple(choices)
        near = difflib.get_close_matches(name, self.choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(self.choices) or "none"
        # A caller that passes `see` lists only some of the choices.
        intro = "There are for example" if see and self.choices else "There are"
        where = f" See: {see}" if see else ""
        super().__init__(f"{name!r} is not {what}.{hint} {intro}: {listed}.{where}")


class BackboneError(AdapterbankError):
    """An encoder cannot be found, read or trusted."""


class BankError(AdapterbankError):
    """A bank or a package cannot be used."""


class PackageRequired(BankError):
    """A package cannot be removed, because others stand on it."""


class PackageDamaged(BankError):
    """A package's files were changed after they were written: a checksum fails."""


class BackboneMismatch(BankError):
    """A package or a bank belongs to another encoder."""


class ServiceError(AdapterbankError):
    """A server refuses a request, or cannot be reached; `code` is the server's error code, empty if it sent none."""

    def __init__(self, message: str, code: str = "", status: int = 0, request_id: str = "") -> None:
        self.code, self.status, self.request_id = code, status, request_id
        super().__init__(message)


class StorageError(AdapterbankError):
    """The disk is full or cannot be written."""


class TrainingError(AdapterbankError):
    """A run fails, though its input may be valid."""

    exit_code = 1


class SlowerWarning(UserWarning):
    """An optimisation is not available on this machine."""
