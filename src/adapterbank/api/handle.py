"""A bank and its encoder in memory: what every method of `OpenBank` works with. Knows no shell and no HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapterbank import config as configs
from adapterbank.api import display
from adapterbank.api.results import Shown, TaskList, TaskManifest
from adapterbank.encoder import backbone as checkpoint
from adapterbank.encoder.backbone import Backbone
from adapterbank.errors import AdapterbankError, InputError, UnknownName
from adapterbank.inference.engine import Engine
from adapterbank.inference.loading import content_name
from adapterbank.inference.task_rows import TaskRows, table_rows
from adapterbank.kinds.kind import ReportTable
from adapterbank.storage import records
from adapterbank.storage.bank import Bank, Removed
from adapterbank.storage.bank_head import is_unused
from adapterbank.storage.package import Manifest, Package
from adapterbank.storage.requirements import below
from adapterbank.tasks.catalog import bank_name
from adapterbank.tasks.examples import labelled_as, read_examples, read_texts
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.streams import format_of
from adapterbank.tasks.tables import is_plain_text, table_from
from adapterbank.training.dataset import scored_table


class BankHandle(Shown):
    """A bank on disk, its encoder, and the engine, each loaded on first use."""

    def __init__(
        self,
        path: str | Path,
        backbone: str | Backbone | None,
        *,
        device: str = "auto",
        precision: str = "auto",
        data_root: str | Path | None = None,
    ) -> None:
        """See `open_bank`."""
        self.data_root = str(data_root) if data_root is not None else None
        configs.parse({"device": device, "precision": precision})  # report a mistake before anything is loaded
        self.path = Path(path)
        self._device, self._precision = device, precision
        self._backbone = backbone if isinstance(backbone, Backbone) else None
        self._name = backbone if isinstance(backbone, str) else None
        self._engine: Engine | None = None
        if (self.path / "bank.json").exists() or backbone is None:
            stored = self.bank.backbone
            if self._backbone is not None or (self._name is not None and self._name != stored["name"]):
                Bank.open(self.path, {"name": self.backbone.name, "sha256": self.backbone.sha256})
            self._name = self._name or stored["name"]
        elif not is_unused(self.path):
            Bank.open(self.path)  # refuse a file or a folder that is not a bank

    def tasks(self) -> TaskList:
        """Return the manifest of each task's default version."""
        packages = [] if is_unused(self.path) else self.bank.tasks()
        return TaskList((package.manifest for package in packages), below(packages))

    def show(self, task: str) -> Manifest:
        """Return the manifest of a task or of one version, `name@2`."""
        return TaskManifest.of(self._package(task).manifest)

    def remove(self, task: str) -> None:
        """Remove a task, or one version of it."""
        self.bank.remove(task)

    def rollback(self, task: str, to: int | None = None) -> int:
        """Make the previous default, or version `to`, the default again; return its number."""
        return self.bank.rollback(bank_name(task), to)

    def gc(self, *, dry_run: bool = False) -> list[Removed]:
        """Remove versions that are neither default nor the target of a rollback, and leftovers of failed writes."""
        return self.bank.gc(dry_run=dry_run)

    def _tables(self) -> list[ReportTable]:
        """Return what is shown of the bank; a bank that cannot be read says why, and nothing is loaded."""
        name = self._backbone_name
        title = ReportTable(f"The bank {self.path} on {name}")
        if is_unused(self.path):
            return [title, ReportTable("It does not exist yet: the first training creates it.")]
        try:
            found, problems = self.bank.listing()
        except AdapterbankError as error:
            return [title, ReportTable(str(error))]
        tables = display.task_list([package.manifest for package in found], name, below(found))
        return [title, *tables, *map(ReportTable, problems)]

    @property
    def bank(self) -> Bank:
        """The bank on disk."""
        return Bank.open(self.path)

    @property
    def backbone(self) -> Backbone:
        """The encoder; loaded on first use and checked against the bank's."""
        if self._backbone is None:
            assert self._name is not None
            self._backbone = checkpoint.load(self._name)
            if (self.path / "bank.json").exists():
                Bank.open(self.path, {"name": self._backbone.name, "sha256": self._backbone.sha256})
        return self._backbone

    @property
    def _backbone_name(self) -> str:
        """The encoder's name; known without loading it."""
        name = self._backbone.name if self._backbone else self._name
        assert name is not None
        return name

    @property
    def engine(self) -> Engine:
        """The encoder on its device, with the tasks that were used so far."""
        if self._engine is None:
            self._engine = Engine(self.backbone, device=self._device, precision=self._precision)
        return self._engine

    def _separate_engine(self) -> Engine:
        """Return a new engine without graphs, like that of an audit."""
        return Engine(self.backbone, device=self._device, precision=self._precision, programs=False)

    def _examples(self, package: Package, data: Any, split: str) -> Examples:
        """Read the labelled rows to score a task on."""
        table = scored_table(package.ref, data, split, self.data_root)
        return read_examples(table, labelled_as(table, Task.from_json(package.manifest.task), None, None, None))[0]

    def _package(self, ref: str) -> Package:
        """Return a package; the error for a task whose method writes no package names the method."""
        bank = self.bank
        try:
            return bank.get(ref)
        except UnknownName:
            runs = (r for r in records.read_all(bank.records_path) if r["config"].get("task") == bank_name(ref))
            method = next((r["config"].get("method") for r in runs if r.get("package", "") is None), None)
            if method is None:
                raise
            raise InputError(
                f"{ref!r} was run with method {method!r}, which writes a record but no package to predict with; "
                "train it with another method, such as adapter."
            ) from None

    def _load(self, package: Package) -> str:
        # By content: a new bank may be created in the same folder while this object exists.
        name = content_name(package)
        if name not in self.engine.residents:
            return self.engine.load(package, name)
        self.engine.ask(name)
        return name

    def _load_task(self, ref: str) -> str:
        return self._load(self._package(ref))

    def _request(self, group: TaskRows) -> tuple[str | None, Examples]:
        name = self._load_task(group.task) if group.task is not None else None
        return name, group.examples(self.engine.residents[name].task if name else None)

    def _spec(self, ref: str) -> Task:
        return Task.from_json(self._package(ref).manifest.task)

    def _columns(
        self,
        task: str | Sequence[str | None] | None,
        data: Any,
        pairs: Sequence[str | None] | None,
        text: str | None,
        text_pair: str | None,
    ) -> tuple[list[str | None], list[tuple[str, ...]]]:
        """Return the task and the texts of each row of data with columns."""
        if pairs is not None:
            raise InputError("The data has columns; name that of the second texts with text_pair instead of pairs.")
        if isinstance(data, str) and format_of(data) is None:
            raise InputError("texts is one string; pass a list of texts, such as [text], or the name of a data file.")
        if isinstance(data, (str, os.PathLike)) and is_plain_text(data):
            if not isinstance(task, str):
                raise InputError(f"{data} has plain lines; several tasks, or none, need a table or a list of texts.")
            read = read_texts(data, self._spec(task))
            return [task] * len(read), list(zip(read.texts, *([read.pairs] if read.pairs else []), strict=True))
        table = table_from(data)
        names = [task] * table.rows if task is None or isinstance(task, str) else list(task)
        return names, table_rows(table, names, self._spec, text, text_pair)
