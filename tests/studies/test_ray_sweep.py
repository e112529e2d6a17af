"""Claims about `adapterbank.studies.ray_sweep`: even if machines die, each run leaves one record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import clusters
from adapterbank.errors import ConfigError, InputError
from adapterbank.install import extra_command
from adapterbank.storage import records
from adapterbank.storage.record_store import FolderStore
from adapterbank.studies import ray_sweep
from adapterbank.studies.grid import make
from adapterbank.studies.ray_sweep import RecordWatcher, ray_engine
from adapterbank.studies.sweep import SweepContext
from adapterbank.studies.units import units
from small_data import FAST, reviews, shell, write

SWEEP = """
import json, sys, threading, time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from adapterbank.studies import grid, sweep
from adapterbank.studies.ray_sweep import ray_engine

study, folder = grid.read("study.yaml"), Path("records")
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
doomed = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
cluster.wait_for_nodes(600)
killed = []

def kill():  # in the middle: some runs have ended, others are active
    while len(list(folder.glob("[!.]*.json"))) < 2:
        time.sleep(0.05)
    killed.append(len(list(folder.glob("[!.]*.json"))))
    cluster.remove_node(doomed, allow_graceful=False)

thread = threading.Thread(target=kill, daemon=True)
thread.start()
outcome = sweep.sweep(study, sweep.make_context(None, "records"), engine=ray_engine())
thread.join(600)
ray.shutdown()
cluster.shutdown()
print(json.dumps({**outcome.to_json(), "killed": killed}))
"""


@pytest.fixture
def here(tmp_path, monkeypatch, checkpoint):
    """Change to a folder with data and a study of eight runs."""
    write(tmp_path / "a.csv", reviews())
    study = {"task": "a", "train": "a.csv", "dev": "a.csv", **FAST, "epochs": 40, "seeds": 4, "layers": ["all", "1"]}
    study |= {"backbone": str(checkpoint("bert")[0]), "device": "cpu"}
    (tmp_path / "study.yaml").write_text(json.dumps(study))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_killed_node_loses_no_run_and_no_run_is_recorded_twice(here):
    pytest.importorskip("ray")
    outcome = json.loads(clusters.run(SWEEP, here))
    assert 2 <= outcome["killed"][0] < 8
    assert (outcome["total"], outcome["known"] + outcome["done"], outcome["failed"]) == (8, 8, 0)
    found = records.read_all(here / "records")
    assert len(found) == len({records.config_hash(record["config"]) for record in found}) == 8
    alone = shell("sweep", "study.yaml", "--records", "alone", "--json")
    assert alone.json["done"] == 8
    for mine, expected in zip(found, records.read_all(here / "alone"), strict=True):
        assert mine["config"] == expected["config"]
        assert mine["metrics"]["dev"]["accuracy"] == pytest.approx(expected["metrics"]["dev"]["accuracy"], abs=1e-5)


def test_without_ray_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=re.escape(extra_command("ray"))):
        ray_engine()


def test_a_sweep_without_ray_does_not_import_it(here):
    code = "import sys, adapterbank.api.opened, adapterbank.studies.ray_sweep; print('ray' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert found.stdout == "False\n"


def test_keep_best_is_refused_because_workers_cannot_compare_scores(tmp_path):
    pytest.importorskip("ray")
    runs = units(make({"task": "mr"}).runs)
    with pytest.raises(ConfigError, match="use none or all with the engine ray"):
        ray_engine()(runs, SweepContext(FolderStore(tmp_path), keep="best"))


@pytest.mark.parametrize("address", ["10.0.0.1:6379", None])
def test_a_missing_cluster_is_reported_in_one_sentence(tmp_path, monkeypatch, address):
    ray = pytest.importorskip("ray")

    def refuse(**_):
        raise ConnectionError("no answer\nwithin 5 seconds.")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    where = address or "this machine"
    with pytest.raises(InputError, match=f"No Ray cluster can be used at {where}: no answer within 5 seconds. Start"):
        ray_engine(address)([], SweepContext(FolderStore(tmp_path)))


@pytest.mark.parametrize(
    ("address", "variable", "wanted"),
    [("a:1", "b:2", "a:1"), (None, "b:2", "b:2"), (None, "", "local"), ("auto", "b:2", "auto")],
)
def test_a_cluster_on_this_machine_is_joined_only_on_request(monkeypatch, address, variable, wanted):
    asked = []
    monkeypatch.setenv("RAY_ADDRESS", variable)
    ray_sweep.join(SimpleNamespace(init=lambda **options: asked.append(options["address"])), address)
    assert asked == [wanted]


def test_a_run_that_was_refused_before_is_reported_when_it_has_ended(tmp_path):
    runs = make({"task": "a", "train": "a.csv", "seeds": 2}).runs
    events, store = [], FolderStore(tmp_path)
    for run in runs:
        store.add({"config": {**run.to_json(), "data": None}, "failure": "no data", "created": "2026-01-01"})
    watcher = RecordWatcher(runs, SweepContext(store, notify=events.append))
    watcher.poll()
    assert events == []
    about = {"metrics": {"dev": {"accuracy": 1.0}}, "task": {"metric": "accuracy"}, "created": "2026-01-02"}
    store.add({"config": {**runs[0].to_json(), "data": {}}, **about})
    watcher.poll()
    watcher.close()
    assert [(event.config, event.kind, event.failure) for event in events] == [
        (runs[0], "done", ""),
        (runs[1], "known", "no data"),
    ]
