"""Records to a table: one row a run, grouped by setting, chosen on dev. Knows no training, no torch and no drawing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from adapterbank.config import Config
from adapterbank.errors import AdapterbankError, InputError
from adapterbank.storage import files, records
from adapterbank.training.dataset import catalog_name

_OPTION = {"adapter": "size", "top": "top", "lora": "rank"}
"""The option that decides how much a method trains."""
_VARIANTS = ("layers", "sites", "activation", "sigma", "train_norms", "placement", "combine", "inner_norm", "depth")
_OUTSIDE = ("seed", "data", "device", "precision", "data_root", "backbone")
"""What two runs of one setting may differ in: the seed, the machine, rows that the seed has drawn; and the name of the
encoder, whose sha256 they share."""


@dataclass(frozen=True)
class RunRow:
    """One run, as tables and figures see it."""

    path: Path
    """Its record."""
    task: str
    catalog: str | None
    """Its name in the catalog."""
    backbone: str
    method: str
    option: int | None
    """Adapter size, number of top layers, rank."""
    lr: float | None
    epochs: int | None
    sigma: float | None
    seed: int
    plain: bool
    """Whether it is the method as it stands in the paper, and no variant of it."""
    setting: str
    """Equal for runs that differ in nothing but the seed."""
    trained: int
    encoder: int
    train_rows: int
    metric: str
    dev: float | None
    test: float | None
    record: dict[str, Any] = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        """The method with its option: `adapter 64`."""
        return self.method if self.option is None else f"{self.method} {self.option}"

    @property
    def split(self) -> str:
        """The split that is shown: GLUE's and SQuAD's test labels are not public, so there it is dev."""
        held = self.catalog is not None and self.catalog.startswith(("glue/", "squad/"))
        return "dev" if held or self.test is None else "test"

    @property
    def shown(self) -> float | None:
        """The score on that split."""
        return self.dev if self.split == "dev" else self.test


@dataclass(frozen=True)
class RunTable:
    """All that the folders of records hold."""

    rows: tuple[RunRow, ...]
    ablations: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    """A sentence for each file that is no usable record."""

    @property
    def backbones(self) -> list[str]:
        """Name the encoders, the one with the most runs first."""
        names = [row.backbone for row in self.rows] + [found["backbone"]["name"] for found in self.ablations]
        return sorted(dict.fromkeys(names), key=lambda name: (-names.count(name), name))

    def suffix(self, backbone: str) -> str:
        """Give what an encoder's files are known by: its last name, counted where shared; nothing of a single one."""
        names = {name: re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name) for name in self.backbones}
        if len(names) < 2:
            return ""
        mine, alike = names[backbone], [name for name in names if names[name] == names[backbone]]
        return f"-{mine}" if alike[0] == backbone else f"-{mine}-{alike.index(backbone) + 1}"

    def of(self, backbone: str) -> RunTable:
        """Give the part of one encoder."""
        rows = tuple(row for row in self.rows if row.backbone == backbone)
        return RunTable(rows, tuple(a for a in self.ablations if a["backbone"]["name"] == backbone), self.problems)


class Mean(NamedTuple):
    """A mean with the standard error of it; none for a single value."""

    mean: float
    sem: float | None
    seeds: int


def load(folders: Iterable[str | Path]) -> RunTable:
    """Read every record and ablation below some folders; what cannot be used is told, not raised."""
    rows: list[RunRow] = []
    ablations: list[dict[str, Any]] = []
    problems: list[str] = []
    failures: list[tuple[Path, dict[str, Any]]] = []
    known: set[str] = set()  # the same record in two folders is one run
    for folder in map(_place, folders):
        for path in _files(folder):
            try:
                if path.parent.name == "ablations":
                    ablations.append(_ablation(path))
                    continue
                record = records.read(path)
                mark = files.sha256_json(record)
                if "failure" in record:
                    failures.append((path, record))
                elif mark not in known:
                    rows.append(read_row(path, record))
                    known.add(mark)
            except (AdapterbankError, AttributeError, KeyError, TypeError, ValueError) as error:
                problems.append(f"{path} is left out: {_told(error, path)}")
    ended = {_run(row.record) for row in rows}  # a run that failed and then went well is no problem
    problems += [f"{path} is left out: the run failed: {r['failure']}" for path, r in failures if _run(r) not in ended]
    called = _names([*(_encoder(row.record["config"]) for row in rows), *(_encoder(one) for one in ablations)])
    rows = [replace(row, backbone=called[_encoder(row.record["config"])]) for row in rows]
    ablations = [{**one, "backbone": {**one["backbone"], "name": called[_encoder(one)]}} for one in ablations]
    return RunTable(tuple(rows), tuple(ablations), tuple(problems))


def _encoder(known: Mapping[str, Any]) -> tuple[str, str]:
    """Give an encoder's name and its sha256, from a run's config or an ablation."""
    held = known["backbone"]
    return (
        (held["name"], held.get("sha256", "")) if isinstance(held, dict) else (held, known.get("backbone_sha256", ""))
    )


def _names(encoders: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Call each encoder by the name that most runs give it; of two with one name each has its sha256 beside it."""
    found: dict[tuple[str, str], str] = {}
    for name, sha256 in dict.fromkeys(encoders):
        same = [other for other, mark in encoders if mark == sha256] if sha256 else [name]
        found[name, sha256] = min(same, key=lambda one: (-same.count(one), one))
    marks: dict[str, set[str]] = {}
    for (_, sha256), called in found.items():
        marks.setdefault(called, set()).add(sha256)
    return {key: called if len(marks[called]) == 1 else f"{called} ({key[1][:8]})" for key, called in found.items()}


def _files(folder: Path) -> list[Path]:
    """List the JSON files of records and ablations: none that is being written, none of an unfinished run."""
    found = [path for path in folder.rglob("*.json") if "runs" not in path.relative_to(folder).parts[:-1]]
    kept = [path for path in found if not path.name.startswith(".")]
    return sorted(kept, key=lambda path: (path.parent, path.name.split(".")[0], len(path.name)))


def _place(folder: str | Path) -> Path:
    """Give a folder of records: a bank's own where the bank is named."""
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"There is no folder of records {folder}; give the folder 'records' of a bank.")
    return path / "records" if (path / "bank.json").is_file() else path


def _run(record: dict[str, Any]) -> str:
    """Give what a run was asked for, whatever its data turned out to be."""
    return json.dumps({k: v for k, v in record["config"].items() if k != "data"}, sort_keys=True)


def read_row(path: Path, record: dict[str, Any]) -> RunRow:
    """Make a row of a record."""
    config = record["config"]
    if not record.get("metrics"):
        raise ValueError("the run gave no scores")
    metric, method = record["task"]["metric"], config["method"]
    scores = {split: _score(found, metric) for split, found in record["metrics"].items()}
    params, option = record.get("params") or {}, config.get(_OPTION.get(method, ""))
    defaults = Config()
    changed = [name for name in _VARIANTS if config.get(name, getattr(defaults, name)) != getattr(defaults, name)]
    return RunRow(
        path=path,
        task=config["task"],
        catalog=catalog_name(config["task"]),
        backbone=config["backbone"],
        method=method,
        option=int(option) if option is not None else None,
        lr=config.get("lr"),
        epochs=config.get("epochs"),
        sigma=config.get("sigma") if method == "adapter" else None,
        seed=config["seed"],
        plain=not changed and "pruned" not in config,
        setting=json.dumps({k: v for k, v in config.items() if k not in _OUTSIDE}, sort_keys=True),
        trained=int(params.get("trained") or 0),
        encoder=int(params.get("encoder") or 0),
        train_rows=int(config["data"]["train"]["rows"]),
        metric=metric,
        dev=scores.get("dev"),
        test=scores.get("test"),
        record=record,
    )


def by_task(rows: Iterable[RunRow]) -> dict[str, list[RunRow]]:
    """Group rows by task; of runs on more and on fewer training rows only those on the most are compared.

    What a seed has held out for dev differs by a few rows, so near numbers count as the same.
    """
    found: dict[str, list[RunRow]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    most = {task: max(row.train_rows for row in mine) for task, mine in found.items()}
    return {task: [row for row in mine if row.train_rows >= 0.95 * most[task]] for task, mine in sorted(found.items())}


def by_setting(rows: Iterable[RunRow]) -> list[list[RunRow]]:
    """Group the runs that differ in the seed alone; of a seed that was run twice the first counts."""
    found: dict[str, dict[int, RunRow]] = {}
    for row in rows:
        found.setdefault(row.setting, {}).setdefault(row.seed, row)
    return [list(mine.values()) for mine in found.values()]


def best(rows: Iterable[RunRow]) -> list[RunRow]:
    """Choose the setting with the best mean on dev, of those with the most seeds; none where nothing has a score.

    A setting run once may be best by luck: it is not set against one that was repeated.
    """
    groups = by_setting(row for row in rows if row.dev is not None)
    if not groups:
        return []
    most = max(map(len, groups))
    return max((mine for mine in groups if len(mine) == most), key=lambda mine: mean([row.dev for row in mine]).mean)


def mean(values: Sequence[float | None]) -> Mean:
    """Give the mean and its standard error."""
    found = [value for value in values if value is not None]
    return Mean(fmean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None, len(found))


def _score(found: Any, metric: str) -> float | None:
    value = found.get(metric) if isinstance(found, dict) else found
    return float(value) if value is not None else None


def _ablation(path: Path) -> dict[str, Any]:
    found = files.read_json(path)
    if not isinstance(found, dict) or not {"package", "layers", "whole", "spans", "backbone", "task"} <= found.keys():
        raise ValueError("it is no ablation")
    return found


def _told(error: Exception, path: Path) -> str:
    said = str(error).replace(f"The record {path}", "it").replace(str(path), "it")
    return f"it has no {error}" if isinstance(error, KeyError) else said
