"""Records as a table: one row per run, grouped by setting, chosen on dev. Knows no training, torch or drawing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from adapterbank import schema
from adapterbank.config import Config
from adapterbank.errors import AdapterbankError, InputError
from adapterbank.methods import METHODS, size_option
from adapterbank.storage import files, records
from adapterbank.studies import selection
from adapterbank.training.dataset import VALIDATION, catalog_name

RECIPES = ("start_from", "on", "fuse", "mix", "average")
"""The options that train the same method in another way; other variants have figures of their own."""
_VARIANTS = ("layers", "sites", "activation", "sigma", "train_norms", "placement", "combine", "inner_norm", "depth",
             *RECIPES)  # fmt: skip
"""The options that make a run a variant of the paper's method."""


class _RowsFields(TypedDict):
    rows: int


class _DataFields(TypedDict):
    train: _RowsFields


class _ConfigFields(TypedDict):
    task: str
    backbone: str
    method: str
    seed: int
    data: _DataFields
    lr: NotRequired[float | None]
    epochs: NotRequired[int | None]
    sigma: NotRequired[float | None]


class _TaskFields(TypedDict):
    metric: str


_BinFields = TypedDict("_BinFields", {"from": float, "rows": int, "confidence": float, "accuracy": float})


class _CoverageFields(TypedDict):
    coverage: float
    abstain: float
    accuracy: float


class _CalibrationFields(TypedDict):
    calibration_error: float
    reliability: list[_BinFields]
    coverage: list[_CoverageFields]


class _RecordFields(TypedDict):
    """What tables and figures read of a record."""

    config: _ConfigFields
    task: _TaskFields
    metrics: NotRequired[dict[str, Annotated[dict[str, Any], dict[str, Any]]] | None]
    params: NotRequired[Annotated[dict[str, Any], dict[str, float | None]] | None]
    history: NotRequired[list[dict[str, Any]] | None]
    calibration: NotRequired[dict[str, Annotated[dict[str, Any], _CalibrationFields]] | None]
    notes: NotRequired[list[str] | None]


@dataclass(frozen=True)
class RunRow:
    """One run, as tables and figures use it."""

    path: Path
    """The file of its record."""
    task: str
    catalog: str | None
    """Its name in the catalog."""
    backbone: str
    method: str
    option: int | str | None
    """Adapter size, a text if it is by layer, number of top layers, rank."""
    lr: float | None
    epochs: int | None
    sigma: float | None
    seed: int
    variant: Mapping[str, str]
    """What makes it a variant of the paper's method: options, and how to say them; empty if it is that method."""
    setting: str
    """Equal for runs of the same setting; see `selection.setting`."""
    trained: int
    encoder: int
    train_rows: int
    metric: str
    dev: float | None
    """The score on the data's own dev rows, if settings were chosen on others (`choose_on`), otherwise on the rows of
    the choice."""
    test: float | None
    record: dict[str, Any] = field(repr=False, compare=False)

    @property
    def place(self) -> tuple[bool, int | str]:
        """Its place among the options of a method: numbers first."""
        return isinstance(self.option, str), self.option or 0

    @property
    def label(self) -> str:
        """The method with its option and what makes it a variant: `adapter 64, mix 4`."""
        method = self.method if self.option is None else f"{self.method} {self.option}"
        return ", ".join([method, *self.variant.values()])

    @property
    def plain(self) -> bool:
        """Whether it is the paper's method, and not a variant of it; adapters narrowed in training are one."""
        return not self.variant and not isinstance(self.option, str)

    @property
    def split(self) -> str:
        """The split that is shown: dev for GLUE and SQuAD, whose test labels are not public, otherwise test."""
        private = self.catalog is not None and self.catalog.startswith(("glue/", "squad/"))
        return "dev" if private or self.test is None else "test"

    @property
    def shown(self) -> float | None:
        """The score on that split."""
        return self.dev if self.split == "dev" else self.test

    def score(self, split: str, metric: str) -> float | None:
        """Return the score on a split by a metric, or by the task's own if the record does not have that one."""
        scores: Any = self.record["metrics"].get(_reported(self.record, split))
        if not isinstance(scores, Mapping):
            return None
        value = scores.get(metric, scores.get(self.metric))
        return float(value) if value is not None else None


@dataclass(frozen=True)
class RunTable:
    """The runs and ablations of some folders of records."""

    rows: tuple[RunRow, ...]
    ablations: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    """A sentence for each file that cannot be used."""
    by: str = "repeated"
    """The rule by which the best setting is chosen, one of `selection.RULES`."""

    @property
    def backbones(self) -> list[str]:
        """The names of the encoders, the one with the most runs first."""
        names = [row.backbone for row in self.rows] + [found["backbone"]["name"] for found in self.ablations]
        return sorted(dict.fromkeys(names), key=lambda name: (-names.count(name), name))

    def suffix(self, backbone: str) -> str:
        """Return the suffix of an encoder's files, from the last part of its name; empty if it is the only encoder."""
        names = {name: re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name) for name in self.backbones}
        if len(names) < 2:
            return ""
        mine, same = names[backbone], [name for name in names if names[name] == names[backbone]]
        return f"-{mine}" if same[0] == backbone else f"-{mine}-{same.index(backbone) + 1}"

    def of(self, backbone: str) -> RunTable:
        """Return the runs and ablations of one encoder."""
        rows = tuple(row for row in self.rows if row.backbone == backbone)
        ablations = tuple(one for one in self.ablations if one["backbone"]["name"] == backbone)
        return replace(self, rows=rows, ablations=ablations)

    def best(self, rows: Iterable[RunRow]) -> list[RunRow]:
        """Return the runs of the best setting on dev, chosen by the rule `by`; none if no run has a score."""
        groups = by_setting(row for row in rows if row.dev is not None)
        return list(selection.best_setting(groups, self.by, lambda row: row.record)) if groups else []


def load(folders: Iterable[str | Path], by: str = "repeated") -> RunTable:
    """Read all records and ablations below some folders.

    Args:
        folders: Folders of records, or banks.
        by: The rule by which tables and figures choose the best setting, one of `selection.RULES`.

    Files that cannot be used are listed in `RunTable.problems`.
    """
    selection.find_rule(by)
    rows: list[RunRow] = []
    ablations: list[dict[str, Any]] = []
    problems: list[str] = []
    failures: list[tuple[Path, dict[str, Any]]] = []
    seen: set[str] = set()  # the same record in two folders is one run
    for folder in map(_records_folder, folders):
        for path in _files(folder):
            try:
                if path.parent.name == "ablations":
                    ablations.append(_ablation(path))
                    continue
                record = records.read(path)
                checksum = files.sha256_json(record)
                if "failure" in record:
                    failures.append((path, record))
                elif checksum not in seen:
                    rows.append(read_row(path, record))
                    seen.add(checksum)
            except (AdapterbankError, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
                problems.append(f"{path} is left out: {_reason(error, path)}")
    done = {selection.request(row.record) for row in rows}  # a run that failed and succeeded later is no problem
    problems += [
        f"{path} is left out: the run failed: {record['failure']}"
        for path, record in failures
        if selection.request(record) not in done
    ]
    names = _names([*(_encoder(row.record["config"]) for row in rows), *(_encoder(one) for one in ablations)])
    rows = [replace(row, backbone=names[_encoder(row.record["config"])]) for row in rows]
    ablations = [{**one, "backbone": {**one["backbone"], "name": names[_encoder(one)]}} for one in ablations]
    return RunTable(tuple(rows), tuple(ablations), tuple(problems), by)


def _encoder(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and sha256 of the encoder in a run's config or an ablation."""
    backbone = values["backbone"]
    if isinstance(backbone, dict):
        return backbone["name"], backbone.get("sha256", "")
    return backbone, values.get("backbone_sha256", "")


def _names(encoders: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the name to show for each encoder: the most frequent one, with the sha256 if two encoders share it."""
    found: dict[tuple[str, str], str] = {}
    for name, sha256 in dict.fromkeys(encoders):
        same = [other for other, checksum in encoders if checksum == sha256] if sha256 else [name]
        found[name, sha256] = min(same, key=lambda one: (-same.count(one), one))
    checksums: dict[str, set[str]] = {shown: set() for shown in found.values()}
    for (_, sha256), shown in found.items():
        checksums[shown] |= {sha256} if sha256 else set()  # a search without an encoder may not know it
    return {
        key: f"{shown} ({key[1][:8]})" if key[1] and len(checksums[shown]) > 1 else shown
        for key, shown in found.items()
    }


def _files(folder: Path) -> list[Path]:
    """Return the JSON files of records and ablations, without those being written and those of unfinished runs."""
    found = [path for path in folder.rglob("*.json") if "runs" not in path.relative_to(folder).parts[:-1]]
    kept = [path for path in found if records.is_record(path.name)]
    return sorted(kept, key=lambda path: (path.parent, records.order(path.name), path.name))


def _records_folder(folder: str | Path) -> Path:
    """Return a folder of records; for a bank, the bank's own."""
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"There is no folder of records {folder}; give the folder 'records' of a bank.")
    return path / "records" if (path / "bank.json").is_file() else path


def read_row(path: Path, record: dict[str, Any]) -> RunRow:
    """Return the row of a record."""
    if problem := schema.problem(_RecordFields, record):
        raise ValueError(problem)
    config = record["config"]
    if not record.get("metrics"):
        raise ValueError("the run has no scores")
    method = config["method"]
    params, option = record.get("params") or {}, config.get(size_option(method) or "")
    defaults = Config()
    variant = {
        name: f"{name.replace('_', ' ')} {value}" if not isinstance(value, bool) else ("" if value else "no ") + name
        for name in _VARIANTS
        if (value := config.get(name, getattr(defaults, name))) != getattr(defaults, name)
    }
    return RunRow(
        path=path,
        task=config["task"],
        catalog=catalog_name(config["task"]),
        backbone=config["backbone"],
        method=method,
        option=option if option is None or isinstance(option, str) else int(option),
        lr=config.get("lr"),
        epochs=config.get("epochs"),
        sigma=config.get("sigma") if method in METHODS and "sigma" in METHODS[method].uses else None,
        seed=config["seed"],
        variant=variant | ({"pruned": "pruned"} if "pruned" in config else {}),
        setting=selection.setting(record),
        trained=int(params.get("trained") or 0),
        encoder=int(params.get("encoder") or 0),
        train_rows=int(config["data"]["train"]["rows"]),
        metric=record["task"]["metric"],
        dev=selection.score(record, _reported(record, "dev")),
        test=selection.score(record, "test"),
        record=record,
    )


def _reported(record: Mapping[str, Any], split: str) -> str:
    """Return the split of a record that is shown as `split`."""
    return VALIDATION if split == "dev" and VALIDATION in record["metrics"] else split


def uses_encoder(row: RunRow) -> bool:
    """Return whether a run's method uses the encoder; a method that this version does not know may."""
    return row.method not in METHODS or METHODS[row.method].slot


def by_task(rows: Iterable[RunRow]) -> dict[str, list[RunRow]]:
    """Group rows by task, and keep only the runs on the most training rows of each task.

    The number of rows held out for dev may differ a little by seed, so similar numbers count as equal.
    """
    found: dict[str, list[RunRow]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    most = {task: max(row.train_rows for row in mine) for task, mine in found.items()}
    return {task: [row for row in mine if row.train_rows >= 0.95 * most[task]] for task, mine in sorted(found.items())}


def by_setting(rows: Iterable[RunRow]) -> list[list[RunRow]]:
    """Group the runs of the same setting; of a seed that was run twice, the first run counts."""
    found: dict[str, dict[int, RunRow]] = {}
    for row in rows:
        found.setdefault(row.setting, {}).setdefault(row.seed, row)
    return [list(mine.values()) for mine in found.values()]


def _ablation(path: Path) -> dict[str, Any]:
    return records.read_ablation(path)


def _reason(error: Exception, path: Path) -> str:
    text = str(error).replace(f"The record {path}", "it").replace(str(path), "it")
    return f"it has no {error}" if isinstance(error, KeyError) else text
