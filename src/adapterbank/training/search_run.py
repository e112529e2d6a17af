"""Runs that search for the best model without the encoder: their record. Knows no packages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from adapterbank.config import Config
from adapterbank.encoder.backbone import Backbone
from adapterbank.runtime import stamp
from adapterbank.training.builder import UnloadedEncoder, identity
from adapterbank.training.dataset import Dataset


def search_record(
    config: Config,
    backbone: Backbone | UnloadedEncoder,
    data: Dataset,
    stage: Callable[[str, int, int], None] = lambda what, d, n: None,
) -> dict[str, Any]:
    """Search for the best model without the encoder and return the record, which notes an interruption.

    The config of an interrupted search has the number of models it tried, so that it does not pass for the whole one.
    """
    from adapterbank.automl.search import check, search

    check(data.task)
    began, metric, notes = time.perf_counter(), data.task.metric, list(data.notes)

    def watch(done: int, total: int, best: float | None) -> None:
        so_far = "" if best is None else f", best {metric} {best:.4f}"
        stage(f"model {done + 1}/{total}{so_far}", done, total)

    result = search(
        data.task,
        data.splits["train"],
        data.splits["dev"],
        trials=config.trials,
        minutes=config.minutes,
        seed=config.seed,
        watch=watch,
    )
    if result.stopped:
        tried = len(result.history)
        notes.append(f"Stopped after {tried} of {config.trials} models; the best of them is kept.")
        config = replace(config, trials=tried)
    stopped = {"stopped": True} if result.stopped else {}
    about = result.about(data.task, data.splits, backbone.parameters)
    rest = {"package": None, "bytes": 0, "stamp": stamp(torch.device("cpu"), torch.float32), **stopped}
    whole = identity(config, backbone, data.about())
    return {"config": whole, **about, **rest, "seconds": time.perf_counter() - began, "notes": notes}
