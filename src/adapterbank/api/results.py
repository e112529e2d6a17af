"""What the methods of an open bank return, with a display for terminals and notebooks; `display` has the words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from adapterbank.api import display
from adapterbank.kinds.kind import ReportTable
from adapterbank.storage.package import Manifest
from adapterbank.studies import grid
from adapterbank.studies.sweep import SweepOutcome
from adapterbank.training.run import Result


class Shown:
    """Shows an object as the tables of `_tables`."""

    def _tables(self) -> list[ReportTable]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return display.to_text(self._tables())

    def _repr_html_(self) -> str:
        return display.to_html(self._tables())


@dataclass(frozen=True, repr=False)
class TrainedResult(Shown, Result):
    """The result of a run."""

    @classmethod
    def of(cls, result: Result) -> TrainedResult:
        """Return a result with a display."""
        return cls(**{one.name: getattr(result, one.name) for one in fields(result)})

    def _tables(self) -> list[ReportTable]:
        return display.result(self.record)


@dataclass(frozen=True, repr=False, eq=False)
class TaskManifest(Shown, Manifest):
    """The manifest of a task's version."""

    @classmethod
    def of(cls, manifest: Manifest) -> TaskManifest:
        """Return a manifest with a display."""
        return cls(**{one.name: getattr(manifest, one.name) for one in fields(manifest)})

    def __eq__(self, other: object) -> bool:
        """Compare by content, also with a manifest that has no display."""
        return isinstance(other, Manifest) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def _tables(self) -> list[ReportTable]:
        return [ReportTable("", (), [list(one) for one in display.manifest_facts(self).items()])]


class TaskList(Shown, list[TaskManifest]):
    """The tasks of a bank."""

    def __init__(self, manifests: Iterable[Manifest], below: Sequence[Manifest] = ()) -> None:
        """Take the manifest of each task, and those of further packages that the tasks stand on."""
        super().__init__(map(TaskManifest.of, manifests))
        self._below = below

    def _tables(self) -> list[ReportTable]:
        return display.task_list(self, below=self._below)


class Evaluation(Shown, dict[str, Any]):
    """The scores of a task on labelled rows, by name."""

    def __init__(self, report: Mapping[str, Any], kind: str, labels: Sequence[str]) -> None:
        """Take a report, and what its tables depend on."""
        super().__init__(report)
        self._kind, self._labels = kind, tuple(labels)

    def _tables(self) -> list[ReportTable]:
        return display.evaluation(self, self._kind, self._labels)


class Evaluations(Shown, dict[str, Evaluation]):
    """The scores of several tasks, by the names that were asked for."""

    def _tables(self) -> list[ReportTable]:
        return [table for one in self.values() for table in one._tables()]


@dataclass(repr=False)
class SweepResult(Shown, SweepOutcome):
    """The result of a sweep."""

    def _tables(self) -> list[ReportTable]:
        progress = self.progress
        counts = f"{progress.known} had records, {progress.done} done, {progress.failed} failed, {progress.left} left"
        title = f"{progress.total} runs: {counts}"
        best = [
            [task, f"{score:.4f}", grid.describe(config)] for task, (score, config) in sorted(progress.best.items())
        ]
        chosen = [
            [name, str(one.record["config"]["task"]), _mean(one.mean("dev"), one.sem("dev"), len(one.runs))]
            for name, one in self.choices
        ]
        told = [["failed", grid.describe(config), failure] for config, failure in progress.failures]
        told += [["note", grid.describe(configs[0]), note] for note, configs in progress.notes.items()]
        tables = [
            ReportTable(title, ["task", "best on dev", "run"] if best else (), best),
            ReportTable("", ["block", "task", "selected: dev"], chosen) if chosen else None,
            ReportTable("", (), told) if told else None,
        ]
        return [table for table in tables if table]


def _mean(mean: float | None, sem: float | None, seeds: int) -> str:
    shown = "-" if mean is None else f"{mean:.4f}"
    return shown if sem is None else f"{shown} ± {sem:.4f} ({seeds})"
