"""The choice of the best setting on dev, over a grid and its seeds. Reads only records.

Two runs have the same *setting* if all their options are equal except the seed and the options that only say where the
run took place: the device, the data folder, and the name of the backbone, whose sha256 must be equal. The precision is
part of the setting, because it changes the arithmetic. This is the only definition of a setting; sweeps, tables,
figures and the report use it.

The best setting of a group is chosen by one of the named `RULES`. The paper chooses on the validation set among all
learning rates, sizes, epochs and seeds, and reports the test score of the chosen run (section 3.1); for its further
tasks it reports the mean over seeds with the standard error (section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from adapterbank.errors import ConfigError
from adapterbank.storage import files
from adapterbank.storage.records import config_hash

_NOT_IN_SETTING = ("seed", "data", "device", "data_root", "backbone", "default")
"""Entries of a record's config in which two runs of one setting may differ."""

Record = Mapping[str, Any]
Item = TypeVar("Item")


class Rule(NamedTuple):
    """A way to compare settings."""

    key: Callable[[Sequence[float]], tuple[float, ...]]
    """The dev scores of a setting's runs -> a sort key; the setting with the largest is the best."""
    text: str
    """Names the best setting in a sentence."""


RULES: Mapping[str, Rule] = {
    "best": Rule(lambda scores: (max(scores, default=-math.inf),), "the setting with the best single run on dev"),
    "mean": Rule(lambda scores: (_fmean(scores),), "the setting with the best mean on dev"),
    "repeated": Rule(
        lambda scores: (len(scores), _fmean(scores)),
        "the setting with the best mean on dev, among those with the most seeds",
    ),
}
"""`best` is the paper's rule and the default of a sweep. `repeated` is the default of tables, figures and the report: a
setting that was run once may be the best by chance, so it does not compete with one that was repeated."""


class Mean(NamedTuple):
    """A mean over seeds with its standard error, which a single value does not have."""

    mean: float
    sem: float | None
    seeds: int


@dataclass(frozen=True)
class Choice:
    """The setting that was chosen for one group of runs."""

    group: dict[str, Any]
    """The options that define the group, and their values."""
    record: dict[str, Any] = field(repr=False)
    """The setting's best run on dev."""
    runs: tuple[dict[str, Any], ...] = field(repr=False)
    """All runs of the setting, by seed."""
    settings: int
    """The number of settings that were compared."""

    def score(self, split: str = "dev") -> float | None:
        """Return the chosen run's score on a split, or None if it has none."""
        return score(self.record, split)

    def mean(self, split: str = "dev") -> float | None:
        """Return the mean over the setting's seeds, or None without scores."""
        scores = self.scores(split)
        return mean(scores).mean if scores else None

    def sem(self, split: str = "dev") -> float | None:
        """Return the standard error of that mean, or None for fewer than two seeds."""
        scores = self.scores(split)
        return mean(scores).sem if scores else None

    def scores(self, split: str = "dev") -> list[float]:
        """Return the score of each seed's run."""
        return _scores(self.runs, split)

    def to_json(self) -> dict[str, Any]:
        """Return a summary of the choice as JSON values."""
        names = ("task", "method", "size", "top", "lr", "epochs", "seed")
        chosen = {name: self.record["config"][name] for name in names}
        scores = {
            name: {"score": self.score(name), "mean": self.mean(name), "sem": self.sem(name)}
            for name in self.record["metrics"]
        }
        summary = {"metric": self.record["task"]["metric"], "scores": scores, "seeds": len(self.runs)}
        return {**chosen, **summary, "settings": self.settings, "record": config_hash(self.record["config"])}


def failed(record: Record) -> bool:
    """Return whether a record is that of a failed run, which has no scores."""
    return "failure" in record


def score(record: Record, split: str = "dev") -> float | None:
    """Return a run's score on a split by its task's own metric, or None if it has none."""
    if failed(record) or split not in record["metrics"]:
        return None
    scores = record["metrics"][split]
    found = scores.get(record["task"]["metric"]) if isinstance(scores, Mapping) else scores
    return None if found is None or math.isnan(found) else float(found)


def mean(values: Iterable[float | None]) -> Mean:
    """Return the mean of the values that are not None, with its standard error.

    The standard error is the sample standard deviation divided by the square root of the number of values.
    """
    found = [value for value in values if value is not None]
    return Mean(fmean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None, len(found))


def setting(record: Record) -> str:
    """Return a text that is equal for two runs exactly if they have the same setting; see the module's docstring."""
    return files.canonical_json({k: v for k, v in record["config"].items() if k not in _NOT_IN_SETTING})


def request(record: Record) -> str:
    """Return a text that is equal for two runs exactly if they were requested with the same options."""
    return files.canonical_json({k: v for k, v in record["config"].items() if k != "data"})


def group(record: Record, per: Sequence[str]) -> str:
    """Return a text that is equal for two runs exactly if the options `per` are."""
    return files.canonical_json([record["config"].get(name) for name in per])


def choose(records: Iterable[Record], per: Sequence[str] = ("task",), by: str = "best") -> list[Choice]:
    """Choose the best setting on dev in each group of runs; ignore failed runs.

    Args:
        records: Records of runs; a config that occurs twice counts once.
        per: The options whose values define a group.
        by: The name of one of the `RULES`. Between equal settings the one with fewer trained parameters is chosen,
            then the one with the lower seed.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        if not failed(record):
            groups.setdefault(group(record, per), {}).setdefault(config_hash(record["config"]), dict(record))
    return [_choose(list(groups[key].values()), per, by) for key in sorted(groups)]


def _choose(records: Sequence[dict[str, Any]], per: Sequence[str], by: str) -> Choice:
    settings: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        settings.setdefault(setting(record), []).append(record)
    runs = best_setting(list(settings.values()), by)
    best = _best_run(runs)
    ordered = tuple(sorted(runs, key=lambda record: int(record["config"]["seed"])))
    return Choice({name: best["config"].get(name) for name in per}, best, ordered, len(settings))


def find_rule(by: str) -> Rule:
    """Return the rule of a name, or list the names."""
    if by not in tuple(RULES):
        raise ConfigError([f"by is {by!r}; it must be one of {', '.join(RULES)}."])
    return RULES[by]


def best_setting(
    settings: Sequence[Sequence[Item]], by: str, record: Callable[[Item], Any] = lambda run: run
) -> Sequence[Item]:
    """Return the best of several settings, each a list of its runs; `record` returns the record of a run."""
    rule = find_rule(by).key

    def key(runs: Sequence[Item]) -> tuple[float, ...]:
        found = [record(run) for run in runs]
        return (*(-value for value in rule(_scores(found))), *_rank(min(found, key=_rank))[1:])

    return _least(settings, key, lambda runs: _best_run([record(run) for run in runs]))


def _best_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return _least(runs, _rank, lambda run: run)


def _least(items: Sequence[Item], key: Callable[[Item], Any], record: Callable[[Item], Any]) -> Item:
    """Return the item with the smallest key; between equal ones, the hash of the record's config decides."""
    keys = [key(item) for item in items]
    least = min(keys)
    equal = [item for item, mine in zip(items, keys, strict=True) if mine == least]
    return equal[0] if len(equal) == 1 else min(equal, key=lambda item: config_hash(record(item)["config"]))


def _rank(record: Record) -> tuple[float, int, int]:
    """Return a sort key: the highest dev score first, then fewer trained parameters, then the lower seed."""
    found = score(record)
    trained = int((record.get("params") or {}).get("trained") or 0)
    return math.inf if found is None else -found, trained, int(record["config"]["seed"])


def _scores(runs: Iterable[Record], split: str = "dev") -> list[float]:
    return [found for record in runs if (found := score(record, split)) is not None]


def _fmean(scores: Sequence[float]) -> float:
    return fmean(scores) if scores else -math.inf
