"""A study as a YAML file: blocks of options whose lists multiply -> its runs. Knows no torch.

    epochs: 10                      # options common to all blocks
    blocks:
      - name: adapters
        task: [glue/cola, {task: glue/sst2, limit: 20000}]
        size: [8, 64, 256]
        lr: [3e-4, 1e-3]
        seeds: 2                    # seeds 0 and 1; a list names them
        select:                     # then run the best setting on dev of each task
          per: [task]
          seeds: 5                  # with these seeds

A file without `blocks` is one block.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from adapterbank import config as configs
from adapterbank.config import AUTO, Config, unused_options
from adapterbank.errors import ConfigError, InputError
from adapterbank.kinds.values import short
from adapterbank.methods import METHODS
from adapterbank.storage.package import check_name
from adapterbank.studies.selection import find_rule
from adapterbank.tasks.catalog import CATALOG, bank_name
from adapterbank.tasks.yaml_files import read_yaml
from adapterbank.training.dataset import canonical, defaults

MAX_RUNS = 100_000
"""Combinations of a study's lists, over all its blocks, and seeds of a selection."""
_FIELDS = tuple(f.name for f in fields(Config))
_RECORDED = frozenset(f.name for f in fields(Config) if not f.metadata["later"])
"""Options that the record of every run has; one that came later is left out at its default."""


@dataclass(frozen=True)
class Select:
    """What to do when all runs of a block have ended: run the best setting of each group with further seeds."""

    per: tuple[str, ...] = ("task",)
    """The options whose values define a group."""
    by: str = "best"
    """The name of one of the `selection.RULES`."""
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class GridBlock:
    """Some runs of a study, and how the best of them are selected."""

    name: str
    runs: tuple[Config, ...]
    select: Select | None = None

    @property
    def further(self) -> int:
        """The number of runs that `select` adds to the grid, at most."""
        if self.select is None:
            return 0
        groups: dict[tuple[Any, ...], set[int]] = {}
        for run in self.runs:
            key = tuple(getattr(run, name) for name in self.select.per)
            groups.setdefault(key, set()).add(run.seed)
        # The chosen setting may have been run with any seed of its group; only other seeds are certainly new.
        return sum(len(set(self.select.seeds) - seeds) for seeds in groups.values())


@dataclass(frozen=True)
class Study:
    """All blocks of a file."""

    blocks: tuple[GridBlock, ...]

    @property
    def runs(self) -> tuple[Config, ...]:
        """The runs of all grids; a run that occurs in several blocks is listed once."""
        return tuple(dict.fromkeys(run for block in self.blocks for run in block.runs))

    @property
    def further(self) -> int:
        """The number of runs that selection adds when the grids are done, at most."""
        return sum(block.further for block in self.blocks)


def read(path: str | Path, overrides: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None) -> Study:
    """Read a study from a YAML file; its options override `base`, and `overrides` override those of every run."""
    if not Path(path).exists():
        raise InputError(f"There is no file {path}; give a study such as configs/table1.yaml.")
    values = read_yaml(path)
    if not isinstance(values, Mapping):
        raise InputError(f"{path} is not a study, which consists of 'name: value' lines; see docs/studies.md.")
    return make(values, overrides, base)


def make(values: Any, overrides: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None) -> Study:
    """Make a study from the content of a YAML file; see `read`. All mistakes are reported together."""
    if not isinstance(values, Mapping):
        raise InputError("A study consists of 'name: value' lines; see docs/studies.md.")
    common = {_key(name): value for name, value in values.items() if name not in ("blocks", "name")}
    blocks = values.get("blocks", [{}])
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, Mapping) for block in blocks):
        problem = f"'blocks' must be a list of blocks, each with options, not {short(repr(blocks))}"
        raise InputError(f"{problem}; see docs/studies.md.")
    mistakes: dict[str, None] = {}
    found: list[GridBlock] = []
    left = MAX_RUNS
    for number, block in enumerate(blocks, 1):
        own = {_key(name): value for name, value in block.items()}
        name = str(own.pop("name", values.get("name", f"block {number}")))
        try:
            given = _with_seeds({**_usable(common, own), **own})
            left -= _count(given, left)
            found.append(_block(name, given, overrides or {}, base or {}))
        except ConfigError as error:
            mistakes |= dict.fromkeys(f"{name}: {mistake}" for mistake in error.mistakes)
    if mistakes:
        raise ConfigError(mistakes)
    return Study(tuple(found))


def _usable(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common options that apply to a block: all but those that its method does not use."""
    method = own.get("method")
    if isinstance(method, list) and len(method) == 1:
        method = method[0]
    unused = unused_options(method) if isinstance(method, str) and method in METHODS else set()

    def used(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: one for name, one in value.items() if _key(name) not in unused}
        return value

    return {
        name: [used(one) for one in value] if isinstance(value, list) else used(value) if name != "select" else value
        for name, value in common.items()
        if name not in unused
    }


def differing(runs: Sequence[Config]) -> tuple[str, ...]:
    """Return the options in which runs differ; options that a run's method does not use are ignored."""
    unused = {method: unused_options(method) for method in {run.method for run in runs}}

    def values(name: str) -> set[Any]:
        return {getattr(run, name) for run in runs if name not in unused[run.method]}

    return tuple(name for name in _FIELDS if len(values(name)) > 1)


def describe(config: Config, differs: Sequence[str] = ()) -> str:
    """Return a readable name of a run: its task and method, the usual options, and those in which the runs differ."""
    usual = ("task", "method", "size", "top", "lr", "epochs", "seed")
    hidden = unused_options(config.method) | {"train", "data_root"}
    names = [name for name in dict.fromkeys([*usual, *differs]) if name not in hidden]
    return " ".join([config.task, config.method, *(f"{n} {_short(getattr(config, n))}" for n in names[2:])])


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _key(name: Any) -> str:
    return str(name).replace("-", "_")


def _with_seeds(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a block with its `seeds` as a list of `seed`."""
    if "seeds" not in values:
        return values
    if "seed" in values:
        one, several = (short(repr(values[name])) for name in ("seed", "seeds"))
        raise ConfigError([f"seed is {one} and seeds is {several}; give one of them."])
    return {name: value for name, value in values.items() if name != "seeds"} | {
        "seed": _seeds(values["seeds"], "seeds")
    }


def _count(values: Mapping[str, Any], left: int) -> int:
    """Return the number of combinations of a block's lists, before any is made; refuse more than are left."""
    count = 1
    for name, value in values.items():
        count *= len(value) if isinstance(value, list) and name != "select" else 1
        if count > 10**12:
            break  # the product of many lists is a number that takes long to print
    if count > left:
        shown = f"{count:,}" if count <= 10**12 else "more than 10^12"
        problem = f"its lists make {shown} runs, and a study may have {MAX_RUNS:,}"
        raise ConfigError([f"{problem} in all; shorten its lists, or divide it into several studies."])
    return count


def _block(name: str, values: dict[str, Any], overrides: Mapping[str, Any], base: Mapping[str, Any]) -> GridBlock:
    select = _select(values.pop("select", None))
    empty = [name for name, value in values.items() if value == []]
    if empty:
        raise ConfigError([f"{name} is an empty list, so there is nothing to run; give a value." for name in empty])
    mistakes: dict[str, None] = {}
    runs: dict[Config, None] = {}
    for chosen in _combinations(values):
        given = {**chosen, **overrides}
        own = defaults(str(given.get("task", "")), given.get("train"))
        try:
            runs[canonical(configs.parse({**base, **own, **given}))] = None
        except ConfigError as error:
            mistakes |= dict.fromkeys(error.mistakes)
    if any(run.start_from == AUTO for run in runs):
        mistakes["start_from is 'auto', which only train can use; list the tasks to start from, and none."] = None
    if any(not run.task for run in runs):
        mistakes["task is missing; give a task or a list of tasks."] = None
    elif any(not run.train for run in runs):
        task = next(run.task for run in runs if not run.train)
        near = difflib.get_close_matches(task, CATALOG, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        mistakes[f"{task!r} is not a task of the catalog, so it needs 'train': a file of training data.{hint}"] = None
    for task in dict.fromkeys(run.task for run in runs if run.task):
        try:
            check_name(bank_name(task))
        except InputError as error:
            mistakes[str(error)] = None
    groups = len({tuple(getattr(run, name) for name in select.per) for run in runs}) if select else 0
    if select and (further := groups * len(select.seeds)) > MAX_RUNS:
        mistakes[f"select adds up to {further:,} runs, and may add {MAX_RUNS:,}; name fewer seeds."] = None
    if mistakes:
        raise ConfigError(mistakes)
    return GridBlock(name, tuple(runs), select)


def _combinations(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the lists; with several methods, each takes only the options that it uses."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    several = len(lists.get("method", ())) > 1
    for combination in itertools.product(*lists.values()):
        pairs = list(zip(lists, combination, strict=True))
        chosen = {name: value for name, value in pairs if not isinstance(value, Mapping)}
        for _, value in pairs:  # the options of a mapping override all others, whatever their order
            chosen |= {_key(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}
        method = chosen.get("method")
        if several and isinstance(method, str) and method in METHODS:
            chosen = {name: value for name, value in chosen.items() if name not in unused_options(method)}
        yield chosen


def _select(value: Any) -> Select | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) - {"per", "by", "seeds"}:
        raise ConfigError([f"select is {short(repr(value))}; it takes per, by and seeds."])
    per = value.get("per", ["task"])
    per = tuple(_key(name) for name in (per if isinstance(per, list) else [per]))
    if unknown := set(per) - set(_FIELDS):
        raise ConfigError([f"select: {sorted(unknown)[0]!r} is not an option of a run; per takes such options."])
    by = value.get("by", "best")
    try:
        find_rule(by)
    except ConfigError as error:
        raise ConfigError(f"select: {mistake}" for mistake in error.mistakes) from None
    return Select(per, by, tuple(_seeds(value.get("seeds", []), "select: seeds")))


def _seeds(value: Any, what: str) -> list[int]:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_RUNS:
        return list(range(value))
    if isinstance(value, list) and all(isinstance(seed, int) and not isinstance(seed, bool) for seed in value):
        return value
    problem = f"{what} is {short(repr(value))}; it must be a number of seeds (at most {MAX_RUNS:,}) or a list of seeds."
    raise ConfigError([problem])


def options(record: Mapping[str, Any]) -> Config | None:
    """Return the options of a recorded run, or None if they are those of another release."""
    config = record["config"]
    return _recorded(config) if config.keys() >= _RECORDED else None


def _recorded(config: Mapping[str, Any]) -> Config:
    return Config(**{name: config[name] for name in _FIELDS if name in config})


def latest(records: Iterable[dict[str, Any]]) -> dict[Config, dict[str, Any]]:
    """Return the valid record of each run by its options: the newest with scores, else the newest failure.

    A run has several records if its data could not be read at first, or has changed since.
    """
    found: dict[Config, dict[str, Any]] = {}
    for record in sorted(records, key=lambda one: ("failure" not in one, str(one.get("created", "")))):
        run = options(record)
        if run is not None:
            found[run] = record
    return found


def with_seeds(chosen: Mapping[str, Any], seeds: Sequence[int]) -> list[Config]:
    """Return a recorded config as one run for each seed."""
    return [replace(_recorded(chosen), seed=seed) for seed in seeds]
