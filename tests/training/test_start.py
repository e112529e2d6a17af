"""Claims about `adapterbank.training.start`: a run's slot begins as that of a task, and only its head is new."""

from __future__ import annotations

import shutil

import pytest
import torch

from adapterbank import config as configs
from adapterbank.api.opened import open_bank
from adapterbank.errors import BackboneMismatch, ConfigError, InputError, PackageDamaged
from adapterbank.methods import METHODS
from adapterbank.storage import records
from adapterbank.training import loop
from short_runs import job_of, quick, stopped_once_saved
from small_data import flags, pairs, reviews, scores, shell, snapshot, write

ROWS, PAIRS = reviews(), pairs()
STARTED = [name for name, row in METHODS.items() if row.slot and name not in ("feature", "fusion")]
RECIPE = {
    *("lr", "epochs", "batch", "warmup", "weight_decay", "epsilon", "bias_correction", "clip", "dropout"),
    *("class_weights", "patience", "max_length", "doc_stride", "sigma"),
}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def heads(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.startswith("head.")}


# --- what a run starts from


@pytest.mark.parametrize("method", STARTED)
def test_everything_but_the_head_is_that_of_the_task_it_starts_from(bank, method):
    source = bank.train("s", ROWS, ROWS, **quick(method)).package
    plain, started = (job_of(bank, PAIRS, **quick(method, start_from=name)) for name in ("none", "s"))
    trained = {name: torch.tensor(array) for name, array in source.tensors().items()}
    assert equal(heads(started.initial), heads(plain.initial))
    assert equal({**started.initial, **heads(trained)}, trained)
    assert not equal(started.initial, plain.initial)
    result = bank.train("t", PAIRS, PAIRS, **quick(method, start_from="s"))
    assert result.package.manifest.recipe["start_from"] == result.record["start_from"]
    assert all(finding.ok for finding in bank.audit())


def test_a_plain_run_is_as_it_was_before(bank):
    bank.train("s", ROWS, ROWS, **quick())
    first = bank.train("t", PAIRS, PAIRS, **quick())
    again = bank.train("t", PAIRS, PAIRS, **quick(start_from="none"))
    assert first.package.manifest.weights_sha256 == again.package.manifest.weights_sha256
    assert first.record_path.stem == again.record_path.stem.partition(".")[0]
    assert not [name for name in first.record["config"] if name.startswith("start_from")]
    assert first.package.manifest.recipe.keys() == RECIPE
    assert "start_from" not in first.record


def test_the_manifest_the_record_and_show_name_the_package_and_its_checksum(bank):
    source = bank.train("s", ROWS, ROWS, **quick()).package
    result = bank.train("t", PAIRS, PAIRS, **quick(start_from="s"))
    about = {"package": "s@1", "weights_sha256": source.manifest.weights_sha256}
    assert bank.show("t").recipe["start_from"] == about
    assert result.record["config"]["start_from"] == "s"
    assert result.record["config"]["start_from_sha256"] == about["weights_sha256"]
    shown = shell("show", "--bank", bank.path, "--task", "t").out
    assert f"s@1 ({about['weights_sha256'][:12]})" in shown


def test_a_task_a_version_and_a_folder_name_the_same_package(bank):
    package = bank.train("s", ROWS, ROWS, **quick()).package
    found = [bank.train("t", PAIRS, PAIRS, **quick(start_from=str(name))) for name in ("s", "s@1", package.path)]
    assert len({one.package.manifest.weights_sha256 for one in found}) == 1
    assert len({one.record["config"]["start_from_sha256"] for one in found}) == 1


def test_another_package_under_the_same_name_is_another_run(bank):
    hashes = []
    for seed in (0, 1):
        bank.train("s", ROWS, ROWS, **quick(seed=seed))
        hashes.append(bank.train("t", PAIRS, PAIRS, **quick(start_from="s")).record_path.stem)
    assert len(set(hashes)) == 2


def test_a_task_continues_from_its_own_version(bank):
    first = bank.train("s", ROWS, ROWS, **quick()).package
    again = bank.train("s", ROWS, ROWS, **quick(start_from="s"))
    assert (again.package.ref, again.record["start_from"]["package"]) == ("s@2", "s@1")
    assert bank.bank.get("s@1").manifest == first.manifest


def test_the_scale_of_numbers_is_that_of_the_new_task(bank):
    large = [(text, 1000 * number) for text, number in scores()]
    bank.train("s", large, large, **quick(kind="regression"))
    started = bank.train("t", scores(), scores(), **quick(start_from="s")).package.manifest
    plain = bank.train("t", scores(), scores(), **quick()).package.manifest
    assert started.method["head"] == plain.method["head"]


def test_with_few_labels_the_slot_starts_from_the_task_and_the_note_says_so(bank):
    bank.train("s", ROWS, ROWS, **quick())
    options = {"size": 4, "max_length": 32, "lr": 0.01, "start_from": "s"}
    result = bank.train("t", ROWS, **options)
    assert result.record["fitted"]["steps"]
    assert any("regressions on the encoder with s@1." in note for note in result.record["notes"])
    assert result.record["start_from"]["package"] == "s@1"


# --- from the shell, in a study, resumed


def test_the_shell_starts_from_a_task(bank, tmp_path, checkpoint):
    bank.train("s", ROWS, ROWS, **quick())
    file = write(tmp_path / "t.csv", ROWS)
    words = ("train", "--bank", bank.path, "--task", "t", "--train", file, "--backbone", checkpoint("bert")[0])
    found = shell(*words, *flags(quick(device="cpu", dev=file)), "--start-from", "s", "--json")
    assert found.json["start_from"]["package"] == "s@1"


def test_values_multiply_in_a_study_and_a_repeated_study_runs_nothing(bank, tmp_path):
    bank.train("s", ROWS, ROWS, **quick())
    file = str(write(tmp_path / "t.csv", ROWS))
    study = {"task": "t", "train": file, "dev": file, "start_from": ["none", "s"], **quick(device="cpu")}
    assert bank.sweep(study).progress.new == 2
    assert bank.sweep(study).progress.new == 0
    found = [one for one in records.read_all(bank.bank.records_path) if one["config"]["task"] == "t"]
    assert sorted(one["config"].get("start_from", "none") for one in found) == ["none", "s"]
    apart = bank.sweep(study, records=tmp_path / "apart").progress
    assert (apart.new, apart.failed) == (2, 0)
    alone = bank.train("t", file, file, **quick(start_from="s")).record
    (swept,) = (one for one in found if "start_from" in one["config"])
    assert alone["config"] == swept["config"]


def test_a_run_of_a_study_that_cannot_start_is_recorded_and_tried_again(bank, tmp_path):
    file = str(write(tmp_path / "t.csv", ROWS))
    study = {"task": "t", "train": file, "dev": file, "start_from": ["none", "s"], **quick(device="cpu")}
    assert (bank.sweep(study).progress.failed, bank.sweep(study).progress.new) == (1, 1)
    bank.train("s", ROWS, ROWS, **quick())
    assert bank.sweep(study).progress.failed == 0


def test_an_interrupted_run_is_resumed(bank, monkeypatch):
    bank.train("s", ROWS, ROWS, **quick())
    whole = bank.train("t", PAIRS, PAIRS, **quick(start_from="s")).package.manifest

    stopped_once_saved(monkeypatch, lambda: bank.train("t", PAIRS, PAIRS, **quick(start_from="s")))
    result = bank.train("t", PAIRS, PAIRS, resume=True, **quick(start_from="s"))
    assert "Resuming after epoch 1." in result.notes
    assert result.package.manifest.weights_sha256 == whole.weights_sha256


# --- what is refused


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({}, {"size": 8}, r"s@1 has size 4, and this run size 8; use --size 4\."),
        ({"layers": "1,2"}, {}, r"s@1 has layers 1,2, and this run layers 0,1,2; use --layers 1,2\."),
        ({"inner_norm": True}, {}, r"s@1 has inner_norm True, and this run inner_norm False; use --inner-norm True\."),
        ({"train_norms": False}, {}, r"s@1 trains other tensors than this run; use the same options of the method\."),
        ({"method": "lora"}, {}, r"trained with method 'lora', and this run uses 'adapter'; use --method lora\."),
        ({}, {"method": "feature"}, r"method 'feature' trains only a head, which is always new; leave it out"),
        ({}, {"start_from": "nobody"}, r"start_from: 'nobody' is not a task of this bank\."),
        ({}, {"start_from": "s@7"}, r"'s' has no version 7"),
        ({}, {"start_from": "./nowhere"}, r"not the folder of a package: it has no manifest\.json; name such a folder"),
    ],
)
def test_another_form_or_an_unknown_name_is_refused_with_the_remedy(bank, source, options, message):
    bank.train("s", ROWS, ROWS, **quick(**source))
    before = snapshot(bank.path)
    with pytest.raises(Exception, match=message) as caught:
        bank.train("t", PAIRS, PAIRS, **quick(**{"start_from": "s", **options}))
    assert caught.value.exit_code == 2
    assert snapshot(bank.path) == before


def test_a_pruned_package_is_refused_with_the_version_before_it(bank):
    bank.train("s", ROWS, ROWS, **quick())
    bank.prune("s", ROWS, tolerance=100)
    with pytest.raises(ConfigError, match=r"s@2 was pruned, and has no adapters in some layers; name s@1"):
        bank.train("t", PAIRS, PAIRS, **quick(start_from="s"))


def test_a_package_of_another_encoder_is_refused(bank, tmp_path, tiny):
    other = open_bank(tmp_path / "other", tiny("roberta"), device="cpu")
    package = other.train("s", ROWS, ROWS, **quick()).package
    with pytest.raises(BackboneMismatch, match=r"which was trained on backbone .*; name a task of the same encoder\."):
        bank.train("t", PAIRS, PAIRS, **quick(start_from=str(package.path)))


def test_a_damaged_package_is_refused(bank, tmp_path):
    package = bank.train("s", ROWS, ROWS, **quick()).package
    copied = shutil.copytree(package.path, tmp_path / "copied")
    weights = copied / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(PackageDamaged, match="has been changed"):
        bank.train("t", PAIRS, PAIRS, **quick(start_from=str(copied)))
    assert bank.bank.names() == ["s"]


def test_a_task_without_a_package_is_refused_with_its_method(bank):
    bank.train("s", ROWS, ROWS, **quick())
    record = {"config": {"task": "words", "method": "automl"}, "package": None}
    records.write(bank.bank.records_path, record)
    with pytest.raises(InputError, match=r"was run with method 'automl' and has no package to start from; train it"):
        bank.train("t", PAIRS, PAIRS, **quick(start_from="words"))


def test_a_new_bank_has_no_task_to_start_from(bank):
    with pytest.raises(Exception, match="'s', but there is no bank to find it in; name a bank that has"):
        bank.train("t", PAIRS, PAIRS, **quick(start_from="s"))
    assert not bank.path.exists()


def test_a_method_without_a_slot_and_an_automatic_size_take_no_start(bank):
    with pytest.raises(ConfigError, match=r"start_from is 's', but method 'automl' does not use it; leave it out\."):
        configs.parse({"method": "automl", "start_from": "s"})
    with pytest.raises(ConfigError, match=r"size is 'auto', but start_from is 's', which has a size; name that size"):
        bank.train("t", PAIRS, PAIRS, **{**quick(start_from="s"), "size": "auto"})


def test_a_started_run_that_collapses_begins_again_from_the_task(bank, monkeypatch):
    bank.train("s", ROWS, ROWS, **quick())
    job = job_of(bank, PAIRS, **quick(start_from="s"))
    written = []
    real = loop.Trainer._restart

    def restart(trainer, run):
        real(trainer, run)
        written.append(trainer.stacks.take(run.slot))

    monkeypatch.setattr(loop.Trainer, "_restart", restart)
    monkeypatch.setattr(loop.Trainer, "_gives_up", lambda self, run: not run.state.restarts)
    from dataclasses import replace

    from adapterbank.encoder.placed import place

    placed = place(bank.backbone, torch.device("cpu"), torch.float32)
    loop.train(placed, [replace(job, collapsed=lambda outputs, losses: True)])
    assert equal(written[0], dict(job.initial))
