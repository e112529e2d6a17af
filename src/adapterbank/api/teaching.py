"""What a run is given from Python, and teaching tasks together: a part of `OpenBank`. Knows no shell and no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, cast

from adapterbank import config as configs
from adapterbank.api.handle import BankHandle
from adapterbank.api.options import CALLBACKS, TrainOptions, listing
from adapterbank.api.progress import reporting
from adapterbank.api.results import TrainedResult
from adapterbank.errors import InputError
from adapterbank.studies.shared import teach_together
from adapterbank.tasks.catalog import bank_name
from adapterbank.tasks.python_data import splits_from
from adapterbank.tasks.tables import Table, table_from
from adapterbank.training.dataset import DatasetReader, defaults
from adapterbank.training.run import Result


class Teaching(BankHandle):
    """A bank whose tasks can be taught together."""

    @listing(TrainOptions)
    def teach_together(
        self,
        tasks: Sequence[str] | Mapping[str, Any],
        name: str,
        *,
        progress: bool | None = None,
        recompute: str = "auto",
        **options: Unpack[TrainOptions],
    ) -> Result:
        """Train one slot on several tasks at once, add it to the bank, and return its record and package.

        Each task has a head of its own; the package keeps that of the first one. Train tasks on it with `on=name`.

        Args:
            tasks: Names of the catalog, or a mapping of names to data: what `train` takes as its `train`, so that a
                mapping may hold the splits train, dev and test.
            name: The name of the package in the bank.
            progress: As in `train`.
            recompute: As in `train`.
            options: As in `train`, for all tasks.
        """
        chosen = cast(dict[str, Any], options)
        given = {one: call for one in CALLBACKS if (call := chosen.pop(one, None)) is not None}
        if mistaken := [one for one in ("task", "train", "dev", "test") if one in chosen]:
            example = '{"reviews": {"train": rows, "dev": others}}'
            raise InputError(f"{mistaken[0]} is given for all tasks; give each its own data, as in {example}.")
        if isinstance(tasks, str):
            raise InputError(f"tasks is {tasks!r}; pass a list of names, or a mapping of names to data.")
        data = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
        if len(data) < len(tasks):
            raise InputError(f"tasks is {','.join(tasks)}; name each of them once.")
        runs = []
        for task, rows in data.items():
            splits, config = self._configured(task, splits_from(train=rows, dev=None, test=None), chosen)
            runs.append((config, DatasetReader(splits)))
        with reporting(progress, given) as callbacks:
            made = teach_together(
                runs, bank_name(name), self.backbone, self.path, callbacks=callbacks, recompute=recompute
            )
        return TrainedResult.of(made)

    def _configured(
        self, task: str, data: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[dict[str, Table], configs.Config]:
        """Return the tables of a run that are given as values, and its config, which names those that are files."""
        paths = {name: str(value) for name, value in data.items() if isinstance(value, str | Path)}
        splits = {name: table_from(value, name) for name, value in data.items() if name not in paths}
        own = {"device": self._device, "precision": self._precision, "data_root": self.data_root}
        own |= defaults(task, data.get("train"))
        config = configs.parse({**own, **options, "backbone": self._backbone_name, "task": task, **paths})
        if options.get("backbone", config.backbone) != config.backbone:
            raise InputError(f"This bank uses {config.backbone!r}; open another bank for {options['backbone']!r}.")
        return splits, config
