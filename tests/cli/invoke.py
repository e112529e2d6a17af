"""Short ways to run a command on the bank in the working folder."""

from __future__ import annotations

from typing import Any

from small_data import Outcome, shell


def run(*words: object, **options: Any) -> Outcome:
    """Run a command on the bank `bank`; it must succeed and print nothing to standard error."""
    found = shell(words[0], "--bank", "bank", *words[1:], **options)
    assert (found.code, found.err) == (0, ""), found
    return found


def on_task(command: str, *words: object) -> Outcome:
    """Run a command on the task `s` of the bank `bank` and its data; it may fail."""
    return shell(command, "--bank", "bank", "--task", "s", "--data", "train.csv", *words)
