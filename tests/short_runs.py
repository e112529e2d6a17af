"""Short runs of a bank: their options, their jobs, and runs that are stopped once a state was saved."""

from __future__ import annotations

import pytest

from adapterbank import config as configs
from adapterbank.training import run_state
from adapterbank.training.builder import RunBuilder
from adapterbank.training.dataset import DatasetReader, canonical
from small_data import FAST


def quick(method="adapter", **options):
    """Return the options of a short training with many labels; the size only if the method has one."""
    chosen = {**FAST, "few": "never", "method": method, **options}
    return {name: value for name, value in chosen.items() if name != "size" or method == "adapter"}


def job_of(bank, rows, **options):
    """Return the job of a run that is not trained."""
    builder = RunBuilder(bank.backbone, reader=DatasetReader({"train": rows, "dev": rows}), bank=bank.path)
    config = configs.parse({"task": "t", "train": "rows", "device": "cpu", **options})
    return builder.prepare(builder.resolve(canonical(config, {"train": rows}))).job


def stopped_once_saved(monkeypatch, train):
    """Call `train`, and stop the run like Ctrl-C as soon as it has saved a state."""
    save = run_state.save

    def save_and_stop(*given):
        save(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_state, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train()
