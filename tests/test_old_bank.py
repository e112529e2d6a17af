"""Promise: this code reads, serves, resumes and reproduces a bank written by the code before release 0.1.0.

The bank is in `tests/old_bank` and is never written again (`make.py` there shows how it was made). On a machine that
computes to the bit as the one that wrote it, trainings must give its weights to the bit; elsewhere, up to rounding.
That code drew random numbers by torch and numpy's `Generator`; the trainings here draw as it did.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
import torch

import adapterbank
from adapterbank.draws import RandomStream
from adapterbank.inference import rows
from adapterbank.slots import tensors
from adapterbank.tasks.spec import Examples
from old_bank.make import RECORDED, stamp
from small_data import process, shell

FIXTURE = Path(__file__).parent / "old_bank"
CHECKSUMS: dict[str, Any] = json.loads((FIXTURE / "checksums.json").read_text(encoding="utf-8"))
PACKAGES: dict[str, dict[str, Any]] = CHECKSUMS["packages"]
UNFINISHED: dict[str, Any] = CHECKSUMS["unfinished"]
ROUNDING = 1e-3
"""How far weights may be from those of another machine: a few steps of training multiply differences of 1e-7."""


def copied(folder: Path) -> Path:
    """Copy the fixture; records and locks must not be written into the original."""
    return Path(shutil.copytree(FIXTURE, folder / "old", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a copy of the fixture and work in it: the bank names its encoder and its data by relative paths."""
    place = copied(tmp_path)
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def bank(folder):
    return adapterbank.open_bank("bank", device="cpu")


@pytest.fixture(scope="module")
def exact() -> bool:
    """Return whether this machine computes as the one that wrote the bank."""
    return stamp() == CHECKSUMS["stamp"]


@pytest.fixture
def old_draws(monkeypatch):
    """Draw initial weights and the order of rows as the code that wrote the bank did."""
    initial = tensors.initial

    def drawn(plan: Any, config: Any, sigma: float, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)  # one stream for all tensors, in their order

        def uniform(_: RandomStream, shape: tuple[int, ...], bound: float) -> np.ndarray:
            return torch.nn.init.kaiming_uniform_(torch.empty(shape), math.sqrt(5), generator=generator).numpy()

        def truncated_normal(_: RandomStream, shape: tuple[int, ...], sigma: float) -> np.ndarray:
            # As `trunc_normal_` of torch 2.13, in whatever version this is.
            found = torch.empty(shape).normal_(0, sigma, generator=generator)
            while (outside := found.abs() > torch.tensor(2 * sigma)).any():
                found = torch.where(outside, torch.empty(shape).normal_(0, sigma, generator=generator), found)
            return found.numpy()

        with mock.patch.multiple(RandomStream, uniform=uniform, truncated_normal=truncated_normal):
            return initial(plan, config, sigma, seed)

    class Orders:
        def __init__(self, *key: int | str) -> None:
            self.permutation = np.random.default_rng([number for number in key if isinstance(number, int)]).permutation

    # Dev rows were held out row by row, also where texts are repeated.
    monkeypatch.setattr(Examples, "keys", lambda examples: list(range(len(examples))))
    monkeypatch.setattr(tensors, "initial", drawn)
    monkeypatch.setattr(rows, "RandomStream", Orders)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """Serve a copy of the bank by the command, and give its address."""
    place = copied(tmp_path_factory.mktemp("served"))
    words = ("serve", "--bank", "bank", "--port", "0", "--device", "cpu", "--json")
    with process(*words, cwd=place, stderr=subprocess.DEVNULL) as running:
        try:
            address = json.loads("".join(itertools.islice(running.stdout, 4)))["address"]
            with adapterbank.Client(address) as client:
                while not client.ready():
                    assert running.poll() is None
                    time.sleep(0.05)
            yield address
        finally:
            running.terminate()


def weights(place: str, ref: str) -> bytes:
    name, version = ref.split("@")
    return Path(place, "tasks", name, version, "weights.safetensors").read_bytes()


def check_weights(found: bytes, ref: str, sha256: str, exact: bool) -> None:
    """Compare weights with those that the old release trained: their bytes, or their numbers within rounding."""
    if exact:
        assert hashlib.sha256(found).hexdigest() == sha256
    new, old = safetensors.numpy.load(found), safetensors.numpy.load(weights("bank", ref))
    assert {name: array.shape for name, array in new.items()} == {name: array.shape for name, array in old.items()}
    for name in sorted(old):
        # A shift of all scores of a span changes no answer: its gradient is rounding alone, which Adam makes large.
        if not (ref.startswith("span@") and name == "head.bias"):
            np.testing.assert_allclose(new[name], old[name], rtol=0, atol=ROUNDING, err_msg=name)


def check_answers(found: list[dict[str, Any]]) -> None:
    """Compare answers, in the order of `data/mixed.jsonl`, with those of the old release."""
    told = [json.loads(line) for line in (FIXTURE / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    for new, old in zip(found, told, strict=True):
        assert new.keys() == old.keys()
        for name, value in old.items():
            near = isinstance(value, dict | float)
            assert new[name] == (pytest.approx(value, abs=1e-4) if near else value), old["task"]


def mixed() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURE / "data/mixed.jsonl").read_text(encoding="utf-8").splitlines()]


# --- packages -------------------------------------------------------------------------------------------------------


def test_the_weights_of_every_package_are_those_that_were_written():
    for ref, about in PACKAGES.items():
        assert hashlib.sha256(weights(str(FIXTURE / "bank"), ref)).hexdigest() == about["sha256"], ref


def test_every_package_is_audited_as_what_it_was(bank, exact):
    found = {one.ref: one for one in bank.audit()}
    assert found.keys() == PACKAGES.keys()
    for ref, one in found.items():
        assert one.ok, f"{ref}: {one.how}"
        assert one.how == "to the bit" or not exact, f"{ref}: {one.how}"


def test_every_package_answers_as_it_did(folder):
    words = ("predict", "--bank", "bank", "--device", "cpu", "--task-column", "task", "data/mixed.jsonl")
    found = shell(*words)
    assert found.code == 0, found.err
    check_answers(found.answers)


def test_every_package_still_has_its_scores(bank, exact):
    files = {"multilabel": "tags.jsonl", "regression": "ratings.tsv", "span": "questions.jsonl"}
    data = {ref: f"data/{files.get(about['task'], 'reviews-dev.csv')}" for ref, about in PACKAGES.items()}
    for ref in [ref for ref, about in PACKAGES.items() if "dev" not in about["files"]]:
        del data[ref]  # its dev rows were held out of the training data
    found = bank.evaluate(data)
    for ref in data:
        kept = bank.show(ref)
        metric = kept.task["metric"]
        # Elsewhere rounding may decide about a row that lies on the threshold of a span task.
        assert found[ref][metric] == pytest.approx(kept.metrics["dev"][metric], abs=1e-6 if exact else 0.05), ref


@pytest.mark.parametrize("ref", PACKAGES)
def test_the_same_options_and_seed_train_the_same_weights(folder, old_draws, exact, ref):
    about = PACKAGES[ref]
    again = adapterbank.open_bank("again", "encoder", device="cpu")
    record = again.train(about["task"], **about["files"], **about["options"]).record
    check_weights(weights("again", record["package"]), ref, about["sha256"], exact)


# --- the bank around them -------------------------------------------------------------------------------------------


def test_the_tasks_are_listed_and_shown(folder):
    newest = {about["task"]: ref for ref, about in PACKAGES.items()}
    listed = shell("tasks", "--bank", "bank", "--json").json
    assert {f"{task['name']}@{task['version']}" for task in listed} == set(newest.values())
    for ref, about in PACKAGES.items():
        shown = shell("show", "--bank", "bank", "--task", ref, "--json").json
        assert (shown["name"], shown["weights_sha256"]) == (about["task"], about["sha256"])
        assert shell("show", "--bank", "bank", "--task", ref).code == 0


def test_an_earlier_version_is_where_a_rollback_goes(bank):
    assert [bank.show(ref).version for ref in ("twice", "twice@1")] == [2, 1]
    assert bank.rollback("twice") == 1
    assert bank.show("twice").weights_sha256 == PACKAGES["twice@1"]["sha256"]


def test_a_new_version_of_an_old_task_takes_the_next_number(bank):
    about = PACKAGES["twice@2"]
    assert bank.train("twice", **about["files"], **{**about["options"], "seed": 9}).record["package"] == "twice@3"
    assert bank.rollback("twice") == 2


def test_nothing_of_the_bank_is_garbage(bank):
    assert bank.gc(dry_run=True) == []


def test_an_unfinished_run_goes_on_after_its_last_epoch_and_ends_as_an_unbroken_one(bank, old_draws, exact):
    about, seen = UNFINISHED, []

    def go_on() -> dict[str, Any]:
        told = {"resume": True, "watch": lambda progress: seen.append(progress.epoch)}
        return bank.train(about["task"], **about["files"], **about["options"], **told).record

    if adapterbank.__version__ != CHECKSUMS["library"]:
        with pytest.raises(adapterbank.AdapterbankError):  # a run is finished by the release that began it
            go_on()
        return
    record = go_on()
    assert set(seen) == {2, 3}
    check_weights(weights("bank", record["package"]), about["ends_as"], about["sha256"], exact)
    assert not any(Path("bank/runs").glob("*/*"))


# --- records --------------------------------------------------------------------------------------------------------


def test_a_study_runs_only_what_has_no_record(folder):
    words = ("sweep", "study.yaml", "--bank", "bank", "--json")
    states = [run["state"] for run in shell(*words, "--dry-run").json["runs"]]
    assert (states.count("done"), states.count("to run")) == (RECORDED, 3)
    first = shell(*words)
    assert first.code == 0, first.err
    # The fourth is the chosen setting with another seed.
    assert [first.json[name] for name in ("known", "done", "failed", "left")] == [RECORDED, 4, 0, 0]
    assert [shell(*words).json[name] for name in ("known", "done")] == [RECORDED + 4, 0]


def test_figures_are_drawn_from_all_records(folder):
    found = shell("figures", "--records", "bank/records", "--out", "figures", "--json")
    assert found.code == 0, found.err
    assert found.json["runs"] == len([*Path("bank/records").glob("*.json")])
    assert "fig6-ablation" not in found.json["missing"]  # which is drawn from the record of `ablate`
    assert all(Path(file).stat().st_size for file in found.json["files"])


def test_a_report_tells_of_all_records(folder):
    found = shell("report", "--records", "bank/records", "--out", "report.html", "--json")
    assert found.code == 0, found.err
    assert found.json["problems"] == []
    assert found.json["runs"] == len([*Path("bank/records").glob("*.json")])


def test_predicting_a_task_that_has_only_a_record_names_its_method(bank):
    with pytest.raises(adapterbank.AdapterbankError, match="automl"):
        bank.predict("words", ["the film was good and great"])


# --- serving --------------------------------------------------------------------------------------------------------


def test_the_keys_are_listed(folder):
    (key,) = shell("keys", "list", "--bank", "bank", "--json").json
    assert (key["name"], key["scopes"]) == ("fixture", ["predict", "train"])


def test_the_key_lets_its_holder_in_and_nobody_else(server):
    with adapterbank.Client(server, CHECKSUMS["key"]) as client:
        assert {task.name for task in client.tasks()} == {about["task"] for about in PACKAGES.values()}
        assert client.tasks().problems == ()
    for key in (None, CHECKSUMS["key"][:-1]):
        with adapterbank.Client(server, key) as client, pytest.raises(adapterbank.AdapterbankError) as refused:
            client.tasks()
        assert refused.value.code == "unauthorized"


def test_every_package_is_served_with_the_answers_it_gave(server):
    rows = [{"task": row["task"], **dict(zip(("text", "pair"), [*row.values()][1:], strict=False))} for row in mixed()]
    with adapterbank.Client(server, CHECKSUMS["key"]) as client:
        found = client.predict_rows(rows)
    assert [f"{one.task}@{one.version}" for one in found] == [row["task"] for row in rows]
    told = [{name: value for name, value in vars(one).items() if value is not None} for one in found]
    check_answers(
        [
            {**{k: [*v] if isinstance(v, tuple) else v for k, v in one.items() if k != "version"}, "task": row["task"]}
            for one, row in zip(told, rows, strict=True)
        ]
    )


def test_the_table_of_runs_has_the_one_that_was_trained_over_http(server):
    with adapterbank.Client(server, CHECKSUMS["key"]) as client:
        (run,) = client.runs()
    assert (run.task, run.state, run.version, run.failure) == ("served", "done", 1, None)
    options = PACKAGES["served@1"]["options"]
    assert {name: run.options[name] for name in options} == options
    assert [row["epoch"] for row in run.history] == [1, 2, 3]
    assert run.metrics["dev"]["accuracy"] == pytest.approx(run.history[-1]["score"])
