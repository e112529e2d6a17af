"""What a user imports: a bank with its encoder in memory, from Python. Knows no shell and no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adapterbank import config as configs
from adapterbank.benchmarks import submissions
from adapterbank.encoder import backbone as checkpoint
from adapterbank.encoder.backbone import Backbone
from adapterbank.errors import InputError, UnknownName
from adapterbank.inference import audit as audits
from adapterbank.inference.engine import Engine
from adapterbank.inference.predictions import Prediction
from adapterbank.inference.task_rows import TaskRows, by_task, in_order
from adapterbank.kinds import scoring
from adapterbank.kinds.span import Reading
from adapterbank.kinds.table import KINDS
from adapterbank.storage import records
from adapterbank.storage.bank import Bank, Removed
from adapterbank.storage.package import Manifest, Package
from adapterbank.studies import ablation, grid, pruning
from adapterbank.studies.progress import SweepProgress
from adapterbank.studies.ray_sweep import find_unit_runner
from adapterbank.studies.size_search import run_auto
from adapterbank.studies.sweep import SweepOutcome, make_context, sweep
from adapterbank.tasks.catalog import bank_name
from adapterbank.tasks.examples import labelled_as, read_examples
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.tables import table_from
from adapterbank.training.callbacks import Callbacks
from adapterbank.training.dataset import DatasetReader, defaults, scored_table
from adapterbank.training.loop import AT_ONCE
from adapterbank.training.run import Result, run


def load_backbone(name: str) -> Backbone:
    """Load an encoder from a folder, a short name (`minilm`) or a name on the hub; see `Backbone.encode`."""
    return checkpoint.load(name)


def open_bank(
    path: str | Path,
    backbone: str | Backbone | None = None,
    *,
    device: str = "auto",
    precision: str = "auto",
    data_root: str | Path | None = None,
) -> OpenBank:
    """Open a bank, or name one that the first training will make.

    Args:
        path: The bank's folder.
        backbone: The encoder, loaded when it is first needed. An existing bank knows its own; a new one needs it.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, fp32 or bf16.
        data_root: Where tasks of the catalog are looked for; that of ADAPTERBANK_DATA without it.
    """
    return OpenBank(path, backbone, device=device, precision=precision, data_root=data_root)


class OpenBank:
    """A bank and its encoder: train, predict, evaluate, audit."""

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
        configs.parse({"device": device, "precision": precision})  # a slip is told before anything is loaded
        self.path = Path(path)
        self._device, self._precision = device, precision
        self._backbone = backbone if isinstance(backbone, Backbone) else None
        self._name = backbone if isinstance(backbone, str) else None
        self._engine: Engine | None = None
        if (self.path / "bank.json").exists() or backbone is None:
            known = self.bank.backbone
            if self._backbone is not None or (self._name is not None and self._name != known["name"]):
                Bank.open(self.path, {"name": self.backbone.name, "sha256": self.backbone.sha256})
            self._name = self._name or known["name"]
        elif self.path.exists():
            Bank.open(self.path)  # a file, or a folder of something else: say so now

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
    def engine(self) -> Engine:
        """The encoder on its device, with the tasks that were asked for so far."""
        if self._engine is None:
            self._engine = Engine(self.backbone, device=self._device, precision=self._precision)
        return self._engine

    def train(
        self,
        task: str,
        train: Any = None,
        dev: Any = None,
        test: Any = None,
        *,
        resume: bool = False,
        prune: bool = False,
        tolerance: float = pruning.TOLERANCE,
        **options: Any,
    ) -> Result:
        """Train a task, put it into the bank, and return its record and package.

        Args:
            task: Its name in the bank, or in the catalog (`glue/mrpc`), whose data is used unless `train` is given.
            train: A file, a name of the catalog, a list of (text, label) or (text, pair, label), a list of dicts, a
                dict of columns, or a data frame.
            dev: The same; by default a seeded, stratified tenth of `train`.
            test: The same; scored once at the end.
            resume: Continue an unfinished run of the same options and data.
            prune: Remove idle adapters afterwards; see `prune`.
            tolerance: Points of the metric that `size="auto"` and `prune` may cost, each.
            options: Any field of a run's config: method, size, lr, epochs, seed, text, label, …; `size="auto"` finds
                the smallest size that is as good as any. Three functions are called as the run goes on: `watch` with a
                `Progress` after each step and epoch; `stage` before the first step with what is being done, how much
                of it is done, and of how much; `note` with sentences for the user.
        """
        callbacks = Callbacks(**{name: options.pop(name) for name in ("watch", "stage", "note") if name in options})
        auto = options.get("size") == "auto"
        options = {name: value for name, value in options.items() if not (auto and name == "size")}
        files = {"train": train, "dev": dev, "test": test}
        paths = {name: str(value) for name, value in files.items() if isinstance(value, str | Path)}
        loose = {name: value for name, value in files.items() if value is not None and name not in paths}
        given = {name: table_from(value, name) for name, value in loose.items()}
        own = {"device": self._device, "precision": self._precision, "data_root": self.data_root}
        own |= defaults(task, train)
        config = configs.parse({**own, **options, "backbone": self.backbone.name, "task": task, **paths})
        if options.get("backbone", config.backbone) != config.backbone:
            raise InputError(f"This bank is open with {config.backbone!r}; open another for {options['backbone']!r}.")
        way: Callable[..., Result] = partial(run_auto, tolerance=tolerance) if auto else run
        reader = DatasetReader(given)
        result = way(config, self.backbone, self.path, reader=reader, callbacks=callbacks, resuming=resume)
        if not prune:
            return result
        data, note = reader.read(config), callbacks.note
        return pruning.prune_result(self._lone_engine(), result, data, tolerance=tolerance, note=note)

    def ablate(
        self,
        task: str,
        data: Any = None,
        *,
        split: str = "dev",
        watch: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Any]:
        """Score a task without the adapters of every span of layers, and keep that beside the bank's records.

        `data` and `split` as in `evaluate`; `watch` hears how many rows of how many are done. The answer has the scores
        of the `whole` model and of each of the `spans` (`first`, `last`, `scores`, `change` in per cent).
        """
        package = self.bank.get(task)
        found = ablation.ablate(self.engine, package, self._examples(package, data, split), watch)
        ablation.save(self.bank, found)
        return found

    def prune(
        self,
        task: str,
        data: Any = None,
        *,
        split: str = "dev",
        tolerance: float = pruning.TOLERANCE,
        watch: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[dict[str, Any], Result | None]:
        """Remove a task's idle adapters: those whose absence costs no more points of the metric than the tolerance.

        Gives what was found, and the new version with its record; None where no adapter is idle.
        """
        package = self.bank.get(task)
        rows = {"dev": self._examples(package, data, split)}
        return pruning.prune(self._lone_engine(), self.bank, package, rows, tolerance=tolerance, watch=watch)

    def _lone_engine(self) -> Engine:
        """Return an engine of its own, as an audit has."""
        return Engine(self.backbone, device=self._device, precision=self._precision, programs=False)

    def _examples(self, package: Package, data: Any, split: str) -> Examples:
        """Read the labelled rows that a task is scored on."""
        table = scored_table(package.ref, data, split, self.data_root)
        return read_examples(table, labelled_as(table, Task.from_json(package.manifest.task), None, None, None))[0]

    def sweep(
        self,
        study: str | Path | Mapping[str, Any],
        *,
        records: str | Path | None = None,
        keep: str = "none",
        limit: int | None = None,
        retry: bool = False,
        jobs: int = AT_ONCE,
        watch: Callable[[SweepProgress], None] = lambda progress: None,
        **cluster: Any,
    ) -> SweepOutcome:
        """Run all of a study that has no record yet, together where that is faster; see docs/studies.md.

        Args:
            study: A YAML file, or its content as a mapping.
            records: Folder or URL of the records; by default the bank's own.
            keep: Which packages go into the bank: none, best (on dev, by task), all.
            limit: How many new runs to start at most.
            retry: Run failed runs again.
            jobs: How many runs share a batch at most.
            watch: Called with the sweep's progress whenever it changes.
            cluster: `ray` is True, or the address of a Ray cluster, to run there; `cpus_per_worker` is the number of
                CPUs, and threads, of each worker.
        """
        own = {"device": self._device, "precision": self._precision, "data_root": self.data_root}
        name = {"backbone": self._backbone.name if self._backbone else self._name}
        made = grid.make(study, name, own) if isinstance(study, Mapping) else grid.read(study, name, own)
        engine = find_unit_runner(**cluster)
        context = make_context(self.path, records, keep=keep, at_once=jobs)
        return sweep(made, context, engine=engine, watch=watch, limit=limit, retry=retry)

    def predict(
        self,
        task: str | Sequence[str | None] | None,
        texts: Sequence[str | tuple[str, str]],
        pairs: Sequence[str | None] | None = None,
        *,
        best: int = 0,
    ) -> list[Prediction]:
        """Predict texts, in order.

        `task` is a name, `name@version`, or one for each text: rows of all tasks go through the encoder together, and
        a row with None gives the bare encoder's embedding. Second texts stand in `pairs`, or in tuples (text, second).
        With `best` span tasks also list as many of their best answers.
        """
        groups = by_task(task, texts, pairs)
        return in_order(groups, self.engine.predict([self._request(group) for group in groups], best))

    def evaluate(
        self,
        task: str | Mapping[str, Any],
        data: Any = None,
        *,
        split: str = "dev",
        text: str | None = None,
        text_pair: str | None = None,
        label: str | None = None,
    ) -> dict[str, Any]:
        """Score a task on labelled data: its own metric, the usual ones of its kind, the confusion matrix.

        Without data a task of the catalog is scored on the catalog's `split`, as is data that is a name of the catalog.
        With a mapping of tasks to data all of them go through the encoder together, and each has its own report.
        `text`, `text_pair` and `label` name columns where the data does not call them as the training data did.
        """
        if isinstance(task, str):
            return self._evaluate({task: data}, split, text, text_pair, label)[task]
        if not isinstance(task, Mapping):
            raise InputError(f"task is {task!r}; give a name, or a mapping of names to data.")
        return self._evaluate(task, split, text, text_pair, label)

    def _evaluate(
        self, wanted: Mapping[str, Any], split: str, text: str | None, text_pair: str | None, label: str | None
    ) -> dict[str, dict[str, Any]]:
        specs, requests, notes = [], [], []
        for name, data in wanted.items():
            package = self._package(name)
            spec = Task.from_json(package.manifest.task)
            table = scored_table(name, data, split, self.data_root)
            examples, report = read_examples(table, labelled_as(table, spec, text, text_pair, label))
            specs.append((package.ref, spec))
            requests.append((self._load(package), examples))
            own = [] if data is not None else [f"No data was given: scored on the catalog's, {table.source}."]
            notes.append([*own, *report.notes])
        found = {}
        for name, (ref, spec), (_, examples), said, told in zip(
            wanted, specs, requests, self.engine.decide(requests, keep=True), notes, strict=True
        ):
            scores = scoring.report(spec, said, examples.targets or [])
            found[name] = {"task": ref, "metric": spec.metric, **scores, "notes": list(told)}
        return found

    def read(self, task: str, examples: Examples, best: int = 1) -> list[Reading]:
        """Return what a span task reads in questions and contexts: the best answers and the score of "no answer"."""
        return self.engine.read(self._load(self._span_package(task)), examples, best, keep=True)

    def _span_package(self, task: str) -> Package:
        package = self._package(task)
        kind = package.manifest.task["kind"]
        if KINDS[kind].readings is None:
            raise InputError(f"{package.ref} is a task of {kind}; only span tasks, such as squad/v1, give answers.")
        return package

    def glue_submission(
        self,
        path: str | Path,
        *,
        use: Mapping[str, str] | None = None,
        partial: bool = False,
        stage: Callable[[str, int, int], None] = lambda what, done, total: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> dict[str, int]:
        """Write the zip that GLUE's server takes, and give the rows of each of its files.

        `use` names a task of the bank for one of the catalog where it is not kept under that name. With `partial` what
        is missing is left out, and `note` hears of it; the server refuses such a file.
        """
        held = {task.name for task in self.tasks()}
        options: dict[str, Any] = {"use": use or {}, "partial": partial, "stage": stage, "note": note}
        return submissions.submit(Path(path), held, self._labels_of, root=self.data_root, **options)

    def glue_score(self) -> dict[str, Any]:
        """Return the GLUE score of the bank's tasks on dev: mean, parts, and what is missing or unofficial."""
        return submissions.dev_score(self.tasks())

    def squad(
        self, task: str, data: Any = None, *, split: str = "dev", best: int = 20, version: str | None = None
    ) -> submissions.SquadAnswers:
        """Answer a SQuAD file, or the catalog's split: predictions, n-best and null odds by id, and official scores.

        `version` is that of the official script, 1.1 or 2.0; by the data without it.
        """
        spec = Task.from_json(self._span_package(task).manifest.task)
        table = scored_table(task, data, split, self.data_root)
        return submissions.answer_squad(table, spec, lambda examples: self.read(task, examples, best), version)

    def _labels_of(self, task: str, examples: Examples) -> list[Any]:
        """Say what a task of labels or numbers makes of rows."""
        name = self._load(self._package(task))
        (found,) = self.engine.predict([(name, examples)])
        return [one.value if one.label is None else one.label for one in found]

    def tasks(self) -> list[Manifest]:
        """List the tasks: the manifest of each one's default version."""
        return [package.manifest for package in self.bank.tasks()] if self.path.exists() else []

    def show(self, task: str) -> Manifest:
        """Return the manifest of a task or of one version, `name@2`."""
        return self._package(task).manifest

    def remove(self, task: str) -> None:
        """Remove a task, or one version of it."""
        self.bank.remove(task)

    def rollback(self, task: str, to: int | None = None) -> int:
        """Make the default before this one, or the version `to`, the default again; gives its number."""
        return self.bank.rollback(bank_name(task), to)

    def gc(self, *, dry_run: bool = False) -> list[Removed]:
        """Remove versions that are neither default nor where a rollback would go, and leftovers of broken writes."""
        return self.bank.gc(dry_run=dry_run)

    def audit(self) -> Iterator[audits.Finding]:
        """Prove that every package's files and outputs are what they were."""
        bank = self.bank
        # Not `self.backbone`, which refuses an encoder that has changed: the audit says so of each package.
        backbone = self._backbone or checkpoint.load(self._name or bank.backbone["name"])
        return audits.audit(bank, backbone, device=self._device, precision=self._precision)

    def _package(self, ref: str) -> Package:
        """Find a package; of a task that has none but was run, say why."""
        bank = self.bank
        try:
            return bank.get(ref)
        except UnknownName:
            runs = (r for r in records.read_all(bank.records_path) if r["config"].get("task") == bank_name(ref))
            made = next((r["config"].get("method") for r in runs if r.get("package", "") is None), None)
            if made is None:
                raise
            raise InputError(
                f"{ref!r} was run with method {made!r}, which leaves a record but no package to predict with; "
                "train it with another method, such as adapter."
            ) from None

    def _load(self, package: Package) -> str:
        # By content: a bank may be made anew in the same folder while this object lives.
        name = f"{package.ref}#{package.manifest.weights_sha256}"
        return name if name in self.engine.residents else self.engine.load(package, name)

    def _request(self, group: TaskRows) -> tuple[str | None, Examples]:
        name = self._load(self._package(group.task)) if group.task is not None else None
        return name, group.examples(self.engine.residents[name].task.text if name else ())
