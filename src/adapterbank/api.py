"""What a user imports: a bank with its encoder in memory, from Python. Knows no shell and no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterbank import audit as audits
from adapterbank import config as configs
from adapterbank import metrics
from adapterbank.bank import Bank, Removed
from adapterbank.encoder import checkpoint
from adapterbank.encoder.checkpoint import Backbone
from adapterbank.errors import InputError
from adapterbank.evaluate import Engine, Prediction
from adapterbank.package import Manifest, Package
from adapterbank.run import Result, run
from adapterbank.tasks.readers import table_from
from adapterbank.tasks.spec import Examples, Task
from adapterbank.tasks.splits import labelled_as, read_examples
from adapterbank.train import Progress


def load_backbone(name: str) -> Backbone:
    """Load an encoder from a folder, a short name (`minilm`) or a name on the hub; see `Backbone.encode`."""
    return checkpoint.load(name)


def open_bank(
    path: str | Path, backbone: str | Backbone | None = None, *, device: str = "auto", precision: str = "auto"
) -> OpenBank:
    """Open a bank, or name one that the first training will make.

    Args:
        path: The bank's folder.
        backbone: The encoder, loaded when it is first needed. An existing bank knows its own; a new one needs it.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, fp32 or bf16.
    """
    return OpenBank(path, backbone, device=device, precision=precision)


class OpenBank:
    """A bank and its encoder: train, predict, evaluate, audit."""

    def __init__(self, path: str | Path, backbone: str | Backbone | None, *, device: str, precision: str) -> None:
        """See `open_bank`."""
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
        train: Any,
        dev: Any = None,
        test: Any = None,
        *,
        resume: bool = False,
        watch: Callable[[Progress], None] = lambda progress: None,
        note: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> Result:
        """Teach the bank a task and give its record and package.

        Args:
            task: Its name in the bank.
            train: A file, a list of (text, label) or (text, pair, label), a list of dicts, a dict of columns, a frame.
            dev: Likewise; a seeded stratified tenth of `train` without it.
            test: Likewise; scored once at the end.
            resume: Go on with an unfinished run of the same options and data.
            watch: Called with a `Progress` after each step and epoch.
            note: Called with what the user should know.
            options: Any field of `adapterbank.config.Config`: method, size, lr, epochs, seed, text, label, …
        """
        files = {"train": train, "dev": dev, "test": test}
        paths = {name: str(value) for name, value in files.items() if isinstance(value, str | Path)}
        loose = {name: value for name, value in files.items() if value is not None and name not in paths}
        given = {name: table_from(value, name) for name, value in loose.items()}
        own = {"device": self._device, "precision": self._precision}
        config = configs.parse({**own, **options, "backbone": self.backbone.name, "task": task, **paths})
        if options.get("backbone", config.backbone) != config.backbone:
            raise InputError(f"This bank is open with {config.backbone!r}; open another for {options['backbone']!r}.")
        return run(config, self.backbone, self.path, data=given, watch=watch, note=note, resuming=resume)

    def predict(
        self,
        task: str | Sequence[str | None] | None,
        texts: Sequence[str | tuple[str, str]],
        pairs: Sequence[str | None] | None = None,
    ) -> list[Prediction]:
        """Predict texts, in order.

        `task` is a name, `name@version`, or one for each text: rows of all tasks go through the encoder together, and
        a row with None gives the bare encoder's embedding. Second texts stand in `pairs`, or in tuples (text, second).
        """
        if isinstance(texts, str):
            raise InputError("texts is one string; give a list of texts, such as [text].")
        many = [task] * len(texts) if task is None or isinstance(task, str) else list(task)
        if len(many) != len(texts) or (pairs is not None and len(pairs) != len(texts)):
            raise InputError(f"There are {len(texts)} texts; give as many tasks and pairs.")
        seconds = list(pairs) if pairs is not None else [None] * len(texts)
        rows = [text if isinstance(text, tuple) else (text, two) for text, two in zip(texts, seconds, strict=True)]
        places: dict[str | None, list[int]] = {}
        for i, name in enumerate(many):
            places.setdefault(name, []).append(i)
        requests = [self._request(name, [rows[i] for i in mine]) for name, mine in places.items()]
        order = [i for mine in places.values() for i in mine]
        answers = [answer for mine in self.engine.predict(requests) for answer in mine]
        return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda row: row[0])]

    def evaluate(
        self,
        task: str | Mapping[str, Any],
        data: Any = None,
        *,
        text: str | None = None,
        text_pair: str | None = None,
        label: str | None = None,
    ) -> dict[str, Any]:
        """Score a task on labelled data: its own metric, the usual ones of its kind, the confusion matrix.

        With a mapping of tasks to data all of them go through the encoder together, and each has its own report.
        `text`, `text_pair` and `label` name columns where the data does not call them as the training data did.
        """
        if isinstance(task, str):
            return self._evaluate({task: data}, text, text_pair, label)[task]
        if not isinstance(task, Mapping):
            raise InputError(f"task is {task!r}; give a name, or a mapping of names to data.")
        return self._evaluate(task, text, text_pair, label)

    def _evaluate(
        self, wanted: Mapping[str, Any], text: str | None, text_pair: str | None, label: str | None
    ) -> dict[str, dict[str, Any]]:
        specs, requests, notes = [], [], []
        for name, data in wanted.items():
            package = self.bank.get(name)
            spec = Task.from_json(package.manifest.task)
            table = table_from(data)
            examples, report = read_examples(table, labelled_as(table, spec, text, text_pair, label))
            specs.append((package.ref, spec))
            requests.append((self._load(package), examples))
            notes.append(report.notes)
        found = {}
        for name, (ref, spec), (_, examples), said, told in zip(
            wanted, specs, requests, self.engine.decide(requests), notes, strict=True
        ):
            scores = metrics.report(spec.kind, said, examples.targets or [], spec.labels, spec.metric)
            found[name] = {"task": ref, "metric": spec.metric, **scores, "notes": list(told)}
        return found

    def tasks(self) -> list[Manifest]:
        """List the tasks: the manifest of each one's default version."""
        return [package.manifest for package in self.bank.tasks()] if self.path.exists() else []

    def show(self, task: str) -> Manifest:
        """Give the manifest of a task or of one version, `name@2`."""
        return self.bank.get(task).manifest

    def remove(self, task: str) -> None:
        """Remove a task, or one version of it."""
        self.bank.remove(task)

    def rollback(self, task: str, to: int | None = None) -> int:
        """Make the default before this one, or the version `to`, the default again; gives its number."""
        return self.bank.rollback(task, to)

    def gc(self, *, dry_run: bool = False) -> list[Removed]:
        """Remove versions that are neither default nor where a rollback would go, and leftovers of broken writes."""
        return self.bank.gc(dry_run=dry_run)

    def audit(self) -> Iterator[audits.Finding]:
        """Prove that every package's files and outputs are what they were."""
        bank = self.bank
        # Not `self.backbone`, which refuses an encoder that has changed: the audit says so of each package.
        backbone = self._backbone or checkpoint.load(self._name or bank.backbone["name"])
        return audits.audit(bank, backbone, device=self._device, precision=self._precision)

    def _load(self, package: Package) -> str:
        # By content: a bank may be made anew in the same folder while this object lives.
        name = f"{package.ref}#{package.manifest.weights_sha256}"
        return name if name in self.engine.residents else self.engine.load(package, name)

    def _request(self, name: str | None, rows: Sequence[tuple[str, str | None]]) -> tuple[str | None, Examples]:
        """Make the engine's request of one task's rows; a task reads one text a row, or two."""
        texts, seconds = [text for text, _ in rows], [second for _, second in rows if second is not None]
        resident = self._load(self.bank.get(name)) if name is not None else None
        if resident is not None:
            columns = self.engine.residents[resident].task.text
            if len(seconds) != (len(rows) if len(columns) == 2 else 0):
                remedy = "pairs too" if len(columns) == 2 else "no pairs"
                raise InputError(f"{name!r} reads {' and '.join(columns)}: give it {remedy}.")
        return resident, Examples(texts, seconds if len(seconds) == len(rows) and seconds else None)
