"""The names and values of answers in a file, beside the columns that it has already. Knows no formats and no engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapterbank.tasks.writers import OutputColumn, value_type

if TYPE_CHECKING:
    from adapterbank.inference.resident import Resident

_HOLDS = {"label": "text", "labels": "texts", "tags": "words", "value": "number", "start": "integer", "end": "integer"}
"""What fields hold whose value may be None."""
ERROR, TRUNCATED = "error", "truncated"


def flat(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer, as JSON has it, for the cells of a table.

    The probability of the label stands for the probabilities of all labels.
    """
    found = dict(answer)
    likely = found.get("probabilities")
    if "label" in found and likely:
        del found["probabilities"]
        found["probability"] = likely.get(found["label"], max(likely.values()))
    return found


def sample_of(resident: Resident, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer with the fields that other answers of its task may have."""
    more = {"windows": 1} if resident.windows > 1 else {}
    return {name: value for name, value in answer.items() if name != TRUNCATED} | more


class AnswerColumns:
    """The columns that the answers of one or more tasks add to a file.

    With one task they have the names of the answer's fields: `label`, `probability`, … With several, or where the file
    has a column of such a name, the task's name stands before them: `sentiment.label`.
    """

    def __init__(self, samples: Mapping[str, Mapping[str, Any]], taken: Collection[str], *, table: bool) -> None:
        """Take an answer of each task, the names of the file's own columns, and whether cells must be `flat`."""
        self._table = table
        self._samples = {task: {**self._fields(one), TRUNCATED: True} for task, one in samples.items()}
        self.prefixed = len(samples) > 1 or any(name in taken for one in self._samples.values() for name in one)
        self.error = ERROR if ERROR not in taken else f"adapterbank.{ERROR}"
        self.names = frozenset(self._name(task, field) for task, one in self._samples.items() for field in one)

    def columns(self) -> list[OutputColumn]:
        """Return the columns of a table, in the order of the tasks, with the one for problems last."""
        fields = [(self._name(task, name), name, value) for task, one in self._samples.items()
                  for name, value in one.items()]  # fmt: skip
        answers = [OutputColumn(column, _HOLDS.get(name) or value_type([value])) for column, name, value in fields]
        return [*answers, OutputColumn(self.error)]

    def of(self, tasks: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what a row gets: the answers of each task."""
        if not self.prefixed and not self._table:
            return dict(answers[0])
        return {self._name(task, name): value for task, answer in zip(tasks, answers, strict=True)
                for name, value in self._fields(answer).items()}  # fmt: skip

    def _fields(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        return flat(answer) if self._table else answer

    def _name(self, task: str, field: str) -> str:
        return f"{task}.{field}" if self.prefixed else field
