"""Which runs count: the best setting on dev over a grid and its seeds, then its test score. Reads records alone.

The paper chooses on the validation set among all learning rates, sizes, epochs and seeds, and reports the chosen run's
test score (section 3.1); for its further tasks it reports the mean over seeds with the standard error (section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapterbank.storage import files
from adapterbank.storage.records import config_hash

_NOT_A_SETTING = ("seed", "data", "device", "data_root", "backbone")
"""What two runs of one setting may differ in; the backbone's own mark, its sha256, they share."""


@dataclass(frozen=True)
class Choice:
    """The setting that was chosen for one group of runs."""

    group: dict[str, Any]
    """The options that made the group, and their values."""
    record: dict[str, Any] = field(repr=False)
    """Of all the setting's runs, the best on dev."""
    runs: tuple[dict[str, Any], ...] = field(repr=False)
    """All runs of the setting, by seed."""
    settings: int
    """How many it was chosen among."""

    def score(self, split: str = "dev") -> float | None:
        """Give the chosen run's score on a split; None where it has none."""
        return score(self.record, split)

    def mean(self, split: str = "dev") -> float | None:
        """Give the mean over the setting's seeds."""
        found = self.scores(split)
        return sum(found) / len(found) if found else None

    def sem(self, split: str = "dev") -> float | None:
        """Give the standard error of that mean: the sample's spread over the root of how many there are."""
        found = self.scores(split)
        if len(found) < 2:
            return None
        mean = sum(found) / len(found)
        return math.sqrt(sum((one - mean) ** 2 for one in found) / (len(found) - 1) / len(found))

    def scores(self, split: str = "dev") -> list[float]:
        """Give the score of each seed's run."""
        return [found for record in self.runs if (found := score(record, split)) is not None]

    def to_json(self) -> dict[str, Any]:
        """Give the choice in short."""
        names = ("task", "method", "size", "top", "lr", "epochs", "seed")
        chosen = {name: self.record["config"][name] for name in names}
        scores = {
            name: {"score": self.score(name), "mean": self.mean(name), "sem": self.sem(name)}
            for name in self.record["metrics"]
        }
        found = {"metric": self.record["task"]["metric"], "scores": scores, "seeds": len(self.runs)}
        return {**chosen, **found, "settings": self.settings, "record": config_hash(self.record["config"])}


def failed(record: Mapping[str, Any]) -> bool:
    """Say whether a record is of a run that gave no result."""
    return "failure" in record


def score(record: Mapping[str, Any], split: str = "dev") -> float | None:
    """Give a run's score on a split by its task's own metric; None where it has none."""
    if failed(record) or split not in record["metrics"]:
        return None
    return float(record["metrics"][split][record["task"]["metric"]])


def setting(record: Mapping[str, Any]) -> str:
    """Give what runs share that differ by chance alone, as text that can be compared."""
    return files.canonical_json({k: v for k, v in record["config"].items() if k not in _NOT_A_SETTING})


def choose(records: Iterable[Mapping[str, Any]], per: Sequence[str] = ("task",), by: str = "best") -> list[Choice]:
    """Choose the best setting on dev of each group; failed runs are passed over.

    `by` is `best`, the paper's way: the setting of the single best run; or `mean`, the best mean over seeds. Of equals
    the one with fewer trained parameters is taken, then the lower seed.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    seen: set[str] = set()
    for record in records:
        mark = config_hash(record["config"])
        if not failed(record) and mark not in seen:  # the same run, run twice, counts once
            seen.add(mark)
            key = files.canonical_json([record["config"].get(name) for name in per])
            groups.setdefault(key, []).append(dict(record))
    return [_choose(groups[key], per, by) for key in sorted(groups)]


def _choose(group: Sequence[dict[str, Any]], per: Sequence[str], by: str) -> Choice:
    settings: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(group, key=_rank):
        settings.setdefault(setting(record), []).append(record)
    if by == "mean":
        runs = min(settings.values(), key=lambda mine: (-_mean(mine), *_rank(mine[0])[1:]))
    else:
        runs = next(iter(settings.values()))
    chosen = {name: runs[0]["config"].get(name) for name in per}
    ordered = tuple(sorted(runs, key=lambda record: int(record["config"]["seed"])))
    return Choice(chosen, runs[0], ordered, len(settings))


def _rank(record: Mapping[str, Any]) -> tuple[float, int, int, str]:
    """Sort the best first."""
    found = score(record)
    dev = -math.inf if found is None or math.isnan(found) else found
    config = record["config"]
    return -dev, int(record["params"]["trained"]), int(config["seed"]), config_hash(config)


def _mean(runs: Sequence[Mapping[str, Any]]) -> float:
    found = [one for record in runs if (one := score(record)) is not None and not math.isnan(one)]
    return sum(found) / len(found) if found else -math.inf
