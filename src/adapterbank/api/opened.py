"""The Python API: a bank with its encoder in memory. Knows no shell and no HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

from adapterbank import config as configs
from adapterbank.api.evaluation import evaluate_tasks
from adapterbank.api.files import FileOptions, FileReport, FileWatch, predict_file
from adapterbank.api.options import CALLBACKS, TrainOptions, listing
from adapterbank.api.progress import reporting
from adapterbank.api.results import Evaluation, Evaluations, SweepResult, TaskManifest, TrainedResult
from adapterbank.api.teaching import Teaching
from adapterbank.benchmarks import submissions
from adapterbank.encoder import backbone as checkpoint
from adapterbank.encoder.backbone import Backbone
from adapterbank.errors import InputError
from adapterbank.inference import audit as audits
from adapterbank.inference.explain import explained
from adapterbank.inference.predictions import Prediction
from adapterbank.inference.task_rows import by_task, in_order, is_tabular
from adapterbank.kinds.span import Reading
from adapterbank.kinds.table import KINDS
from adapterbank.methods import METHODS
from adapterbank.storage.package import Manifest, Package
from adapterbank.studies import ablation, grid, pruning
from adapterbank.studies import soup as soups
from adapterbank.studies.progress import SweepProgress
from adapterbank.studies.ray_sweep import find_unit_runner
from adapterbank.studies.start_search import choose_training
from adapterbank.studies.sweep import SweepOutcome, make_context, sweep
from adapterbank.tasks.catalog import bank_name
from adapterbank.tasks.dialects import FileForm
from adapterbank.tasks.python_data import splits_from
from adapterbank.tasks.spec import Examples, Task
from adapterbank.training.dataset import DatasetReader, canonical, scored_table
from adapterbank.training.loop import AT_ONCE
from adapterbank.training.run import Result

LOG = logging.getLogger("adapterbank.load")


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
    """Open a bank, or name one that the first training will create.

    Args:
        path: The bank's folder.
        backbone: The encoder, loaded on first use. An existing bank knows its own; a new one needs it.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, fp32, bf16 or int8.
        data_root: Folder with the data of the catalog's tasks; by default ADAPTERBANK_DATA.
    """
    return OpenBank(path, backbone, device=device, precision=precision, data_root=data_root)


class OpenBank(Teaching):
    """A bank and its encoder: train, predict, evaluate, audit."""

    @listing(TrainOptions)
    def train(
        self,
        task: str,
        train: Any = None,
        dev: Any = None,
        test: Any = None,
        *,
        resume: bool = False,
        prune: bool = False,
        tolerance: float = configs.TOLERANCE,
        progress: bool | None = None,
        recompute: str = "auto",
        **options: Unpack[TrainOptions],
    ) -> Result:
        """Train a task, add it to the bank, and return its record and package.

        Args:
            task: Its name in the bank, or in the catalog (`glue/mrpc`), whose data is used unless `train` is given.
            train: A file, a name of the catalog, a list of (text, label) or (text, pair, label), a list of dicts, a
                dict of columns, NumPy arrays, a data frame, a `datasets.Dataset`; or several of these by the name of
                their split, `{"train": …, "test": …}`.
            dev: The same; by default a seeded, stratified tenth of `train`.
            test: The same; scored once at the end.
            resume: Continue an unfinished run of the same options and data.
            prune: Remove idle adapters afterwards; see `prune`.
            tolerance: Points of the metric that `size="auto"` and `prune` may each cost.
            progress: Show progress and notes; by default in a terminal and in a notebook.
            recompute: Compute outputs again instead of keeping them, for less memory: auto (if it runs out), always,
                never.
            options: Any field of a run's config: method, size, lr, epochs, seed, text, label, …; `size="auto"` finds
                the smallest size that scores as well as any. Three callbacks replace what `progress` shows: `watch`
                gets a `Progress` after each step and epoch; `stage` gets the current stage before the first step, how
                much of it is done, and the total; `note` gets messages for the user.
        """
        chosen = cast(dict[str, Any], options)
        given = {name: call for name in CALLBACKS if (call := chosen.pop(name, None)) is not None}
        auto = chosen.get("size") == "auto"
        chosen = {name: value for name, value in chosen.items() if not (auto and name == "size")}
        splits, config = self._configured(task, splits_from(train=train, dev=dev, test=test), chosen)
        train_run = partial(choose_training(config, any_size=auto, tolerance=tolerance), recompute=recompute)
        reader = DatasetReader(splits)
        with reporting(progress, given) as callbacks:
            encoder = self.backbone if auto or METHODS[config.method].slot else self._backbone
            result = train_run(config, encoder, self.path, reader=reader, callbacks=callbacks, resuming=resume)
            if not prune or encoder is None:
                return TrainedResult.of(result)
            data, note = reader.read(canonical(config, reader.splits)), callbacks.note
            pruned = pruning.prune_result(self._separate_engine(), result, data, tolerance=tolerance, note=note)
            return TrainedResult.of(pruned)

    def ablate(
        self,
        task: str,
        data: Any = None,
        *,
        split: str = "dev",
        watch: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Any]:
        """Score a task without the adapters of every span of layers, and save the result beside the bank's records.

        `data` and `split` are as in `evaluate`; `watch` is called with the numbers of rows that are done and in total.
        The result has the scores of the `whole` model and of each of the `spans` (`first`, `last`, `scores`, and
        `change` in per cent).
        """
        package = self.bank.get(task)
        result = ablation.ablate(self.engine, package, self._examples(package, data, split), watch)
        ablation.save(self.bank, result)
        return result

    def prune(
        self,
        task: str,
        data: Any = None,
        *,
        split: str = "dev",
        tolerance: float = configs.TOLERANCE,
        watch: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[dict[str, Any], Result | None]:
        """Remove a task's idle adapters: those whose absence costs no more points of the metric than the tolerance.

        Return the findings, and the new version with its record; None if no adapter is idle.
        """
        package = self.bank.get(task)
        rows = {"dev": self._examples(package, data, split)}
        return pruning.prune(self._separate_engine(), self.bank, package, rows, tolerance=tolerance, watch=watch)

    def soup(
        self,
        tasks: Sequence[str],
        name: str | None = None,
        data: Any = None,
        *,
        split: str = "dev",
        default: str = "new",
    ) -> Manifest:
        """Average versions of a task that have one start, add the average to the bank, and return its manifest.

        `name` is the task of the new version, by default that of the versions. `data`, as in `evaluate`, scores and
        calibrates the average; without it nothing is scored. `default` is as in `train`.
        """
        options = {"name": bank_name(name or ""), "default": configs.parse({"default": default}).default}
        packages = [self._package(task) for task in tasks]
        rows = None if data is None or not packages else self._examples(packages[0], data, split)
        made = soups.soup(self._separate_engine(), self.bank, packages, examples=rows, **options)
        return TaskManifest.of(made.manifest)

    def sweep(
        self,
        study: str | Path | Mapping[str, Any],
        *,
        records: str | Path | None = None,
        keep: str = "none",
        limit: int | None = None,
        retry: bool = False,
        jobs: int = AT_ONCE,
        recompute: str = "auto",
        watch: Callable[[SweepProgress], None] = lambda progress: None,
        **cluster: Any,
    ) -> SweepOutcome:
        """Run all runs of a study that have no record yet, together if that is faster; see docs/studies.md.

        Args:
            study: A YAML file, or its contents as a mapping.
            records: Folder or URL of the records; by default the bank's own.
            keep: Which packages to add to the bank: none, best (on dev, by task), all.
            limit: The most new runs to start.
            retry: Run failed runs again.
            jobs: The most runs that share a batch.
            recompute: As in `train`.
            watch: Called with the sweep's progress whenever it changes.
            cluster: `ray` is True or the address of a Ray cluster to run on; `cpus_per_worker` is the number of CPUs
                and threads of each worker.
        """
        own = {"device": self._device, "precision": self._precision, "data_root": self.data_root}
        name = {"backbone": self._backbone_name}
        made = grid.make(study, name, own) if isinstance(study, Mapping) else grid.read(study, name, own)
        engine = find_unit_runner(**cluster)
        context = make_context(self.path, records, keep=keep, at_once=jobs, recompute=recompute)
        outcome = sweep(made, context, engine=engine, watch=watch, limit=limit, retry=retry)
        return SweepResult(outcome.progress, outcome.choices)

    def predict(
        self,
        task: str | Sequence[str | None] | None,
        texts: Any,
        pairs: Sequence[str | None] | None = None,
        *,
        text: str | None = None,
        text_pair: str | None = None,
        best: int = 0,
        abstain: float = 0.0,
        explain: bool = False,
    ) -> list[Prediction]:
        """Return a prediction for each text, in order.

        Rows of all tasks go through the encoder together. `predict_file` reads and writes files of any size.

        Args:
            task: A name, `name@version`, or a list with one for each row; None gets the bare encoder's embedding.
            texts: A list, an array or a column of texts, or of tuples (text, second text); or data with columns, in
                every form that `train` takes: a file, a data frame, a dict of columns, a list of dicts. Labels in it
                are not read.
            pairs: The second texts, if they are in a list of their own.
            text: The column of the text. By default the one that the task was trained on, or one with a usual name.
            text_pair: The column of the second text.
            best: How many of their best answers span tasks list, beside the best.
            abstain: `label` and `labels` are None where the answer is less probable than this; the probabilities are
                given all the same.
            explain: Each prediction has an `explanation`: each word's share in the answer, found by leaving it out.
        """
        if is_tabular(texts):
            task, texts = self._columns(task, texts, pairs, text, text_pair)
        elif text or text_pair:
            raise InputError(f"There are no columns to find {text or text_pair!r} in; pass a data frame or a file.")
        groups = by_task(task, texts, pairs)
        requests, answer = [self._request(group) for group in groups], self.engine.predict
        predict = partial(answer, best=best, abstain=abstain)
        return in_order(groups, explained(predict, requests) if explain else predict(requests))

    def predict_file(
        self,
        task: str | Sequence[str] | None,
        source: str | Path,
        output: str | Path,
        *,
        text: str | None = None,
        text_pair: str | None = None,
        task_column: str | None = None,
        best: int = 0,
        abstain: float = 0.0,
        watch: Callable[[int, int, int | None], None] = lambda rows, done, total: None,
        problem: Callable[[str], None] = lambda text: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> FileReport:
        """Answer the rows of a file of any size, and write each with its answer; see docs/files.md.

        The report counts the `rows` written and those among them that `failed`: these have an error, no answer.

        Args:
            task: A name, `name@version`, or a list of tasks that answer every row; None with `task_column`.
            source: CSV, TSV, JSONL, Parquet, or plain text with one text on each line, by its extension.
            output: CSV, TSV, JSONL or Parquet, by its extension; complete once it has its name.
            text: The column of the text. By default the one that the task was trained on, or one with a usual name.
            text_pair: The column of the second text.
            task_column: The column with the task of each row, instead of `task`.
            best: How many of their best answers span tasks list, beside the best.
            abstain: As in `predict`.
            watch: Called with the rows written, how much of the file was read, and its size in the same unit (bytes;
                rows for Parquet).
            problem: Called for each row that has no answer, with its place and the reason.
            note: Called with messages for the user.
        """
        tasks = [task] if isinstance(task, str) else list(task or ())
        if bool(tasks) == (task_column is not None):
            raise InputError("Pass either task, or task_column for a file whose rows name their tasks.")
        options = FileOptions(text=text, text_pair=text_pair, task_column=task_column, best=best, abstain=abstain)
        return predict_file(self, tasks, source, output, options, FileWatch(watch, problem, note), FileReport())

    def evaluate(
        self,
        task: str | Mapping[str, Any],
        data: Any = None,
        *,
        split: str = "dev",
        text: str | None = None,
        text_pair: str | None = None,
        label: str | None = None,
        separator: str | None = None,
        header: bool | None = None,
        drop_unlabelled: bool = False,
    ) -> Evaluation | Evaluations:
        """Score a task on labelled data: its own metric, the usual ones of its kind, their 95 % confidence intervals.

        The report of a kind with probabilities also has the calibration error, a reliability table and the accuracy at
        several coverages; that of classification the confusion matrix.

        Without data, a task of the catalog is scored on the catalog's `split`, as is data that is a name of the
        catalog. With a mapping of tasks to data, all of them go through the encoder together, and each has its own
        report. `text`, `text_pair` and `label` name columns whose names differ from those of the training data;
        `separator`, `header` and `drop_unlabelled` are as in training.
        """
        configs.parse({"separator": separator})
        form = FileForm(separator, header)
        if isinstance(task, str):
            return evaluate_tasks(self, {task: data}, split, text, text_pair, label, form, drop_unlabelled)[task]
        if not isinstance(task, Mapping):
            raise InputError(f"task is {task!r}; pass a name, or a mapping of names to data.")
        return evaluate_tasks(self, task, split, text, text_pair, label, form, drop_unlabelled)

    def read(self, task: str, examples: Examples, best: int = 1) -> list[Reading]:
        """Return a span task's readings of questions and contexts: the best answers and the score of "no answer"."""
        return self.engine.read(self._load(self._span_package(task)), examples, best, keep=True)

    def _span_package(self, task: str) -> Package:
        package = self._package(task)
        kind = package.manifest.task["kind"]
        if KINDS[kind].readings is None:
            raise InputError(f"{package.ref} is a task of {kind}; only span tasks, such as squad/v1, have answers.")
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
        """Write the zip file for GLUE's server, and return the number of rows of each of its files.

        `use` maps names of the catalog to tasks of the bank that have other names. With `partial`, missing tasks are
        left out and reported to `note`; the server refuses such a file.
        """
        names = {task.name for task in self.tasks()}
        options: dict[str, Any] = {"use": use or {}, "partial": partial, "stage": stage, "note": note}
        return submissions.submit(Path(path), names, self._labels_of, root=self.data_root, **options)

    def glue_score(self) -> dict[str, Any]:
        """Return the GLUE score of the bank's tasks on dev: mean, parts, and what is missing or unofficial."""
        return submissions.dev_score(self.tasks())

    def squad(
        self, task: str, data: Any = None, *, split: str = "dev", best: int = 20, version: str | None = None
    ) -> submissions.SquadAnswers:
        """Answer a SQuAD file or the catalog's split; return predictions, n-best, null odds by id, and official scores.

        `version` is that of the official script, 1.1 or 2.0; by default it follows from the data.
        """
        spec = Task.from_json(self._span_package(task).manifest.task)
        table = scored_table(task, data, split, self.data_root)
        return submissions.answer_squad(table, spec, lambda examples: self.read(task, examples, best), version)

    def _labels_of(self, task: str, examples: Examples) -> list[Any]:
        """Return the predicted label or number of each row."""
        name = self._load(self._package(task))
        (predictions,) = self.engine.predict([(name, examples)])
        return [prediction.value if prediction.label is None else prediction.label for prediction in predictions]

    def audit(self) -> Iterator[audits.Finding]:
        """Prove that every package's files and outputs are unchanged."""
        bank = self.bank
        # Not `self.backbone`, which refuses a changed encoder: the audit reports that for each package.
        backbone = self._backbone or checkpoint.load(self._name or bank.backbone["name"])
        return audits.audit(bank, backbone, device=self._device, precision=self._precision)
