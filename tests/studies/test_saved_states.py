"""Claims about `adapterbank.studies.saved_states`: a stopped sweep resumes its unfinished runs."""

from __future__ import annotations

import pytest

from adapterbank.api.opened import open_bank
from adapterbank.storage.records import read_all
from adapterbank.studies import saved_states
from small_data import FAST, reviews, write


def test_an_unfinished_run_resumes_from_its_saved_state(bert, tmp_path, monkeypatch):
    write(tmp_path / "a.csv", reviews())
    monkeypatch.chdir(tmp_path)
    bank = open_bank("bank", bert, device="cpu")
    monkeypatch.setattr(saved_states, "SAVE_EVERY", 0.0)
    grid = {"task": "a", "train": "a.csv", "dev": "a.csv", **FAST, "epochs": 5, "size": 4, "seeds": 2}
    stopped = []

    def stop(progress):
        if progress.last.kind == "running" and progress.last.share > 0.5:
            stopped.append(progress.last.share)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bank.sweep(grid, watch=stop)
    assert len(list((bank.path / "runs").glob("*/state.json"))) == 2
    shares = []
    bank.sweep(grid, watch=lambda progress: shares.append(progress.last.share))
    assert min(share for share in shares if share) > 0.4
    assert list((bank.path / "runs").iterdir()) == []
    whole = open_bank("whole", bert, device="cpu")
    whole.sweep(grid)
    for resumed, unbroken in zip(read_all(bank.path / "records"), read_all(whole.path / "records"), strict=True):
        assert resumed["notes"][-1].startswith("Resuming after epoch ")
        losses = [[epoch["loss"] for epoch in one["history"]] for one in (resumed, unbroken)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
