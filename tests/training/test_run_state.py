"""`training.run_state`: an interrupted run does not damage the bank, and resumes exactly."""

from __future__ import annotations

import json
import signal
import time
from unittest import mock

import pytest
import safetensors.torch
import torch

from adapterbank.api.opened import open_bank
from adapterbank.api.progress import Display
from adapterbank.errors import InputError
from adapterbank.storage import files, reading
from adapterbank.training import run_state
from adapterbank.training.job import RunState
from small_data import FAST, flags, process, reviews, shell, snapshot, write

ROWS = reviews()
LONG = {**FAST, "epochs": 4}


@pytest.fixture
def bank(tmp_path, bert):
    return open_bank(tmp_path / "bank", bert, device="cpu")


def stop_at(epoch, step=2):
    """Return a watcher that raises Ctrl-C in the middle of an epoch; an epoch has three steps here."""

    def watch(progress):
        if progress.score is None and progress.epoch == epoch and progress.step == 3 * (epoch - 1) + step:
            raise KeyboardInterrupt

    return watch


def interrupt(bank, *, watch=None, **options):
    with pytest.raises(KeyboardInterrupt):
        bank.train("s", ROWS, ROWS, watch=watch or stop_at(2), **{**LONG, **options})


def kept(bank):
    """Return the folders of unfinished runs."""
    runs = bank.path / "runs"
    return sorted(path for path in runs.iterdir() if any(path.iterdir())) if runs.exists() else []


def test_an_interrupted_run_leaves_its_state_and_no_new_version(bank):
    bank.train("s", ROWS, ROWS, **FAST, seed=9)
    before = snapshot(bank.path, without=["runs"])
    interrupt(bank)
    assert snapshot(bank.path, without=["runs"]) == before
    (folder,) = kept(bank)
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-1.safetensors", "state.json"]
    assert json.loads((folder / "state.json").read_text())["epoch"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "full", "size": 64, "lr": 1e-4},
        {"method": "top", "size": 64, "lr": 1e-3, "top": 2},
        {"method": "feature", "size": 64, "head_hidden": 8},
        {"dropout": 0.3, "clip": 0, "warmup": 0.5},
        {"bias_correction": False, "class_weights": "balanced"},
        {"patience": 2},
        {"average": True},
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(bank, tmp_path, bert, options):
    interrupt(bank, **options)
    notes = []
    resumed = bank.train("s", ROWS, ROWS, resume=True, note=notes.append, **{**LONG, **options})
    whole = open_bank(tmp_path / "uninterrupted", bert, device="cpu").train("s", ROWS, ROWS, **{**LONG, **options})
    assert notes[0] == "Resuming after epoch 1."
    assert resumed.package.manifest.weights_sha256 == whole.package.manifest.weights_sha256
    assert resumed.package.manifest.fingerprint == whole.package.manifest.fingerprint
    for name in ("metrics", "best_epoch", "params", "config"):
        assert resumed.record[name] == whole.record[name]
    for part in ("loss", "score"):
        assert [e[part] for e in resumed.record["history"]] == [e[part] for e in whole.record["history"]]
    assert kept(bank) == []


@pytest.mark.parametrize("stops", [[(1, 1)], [(2, 2), (2, 3), (3, 1)], [(4, 3)]])
def test_the_result_does_not_depend_on_when_or_how_often_a_run_is_interrupted(bank, tmp_path, bert, stops):
    for place in stops:
        interrupt(bank, watch=stop_at(*place), resume=True)
    resumed = bank.train("s", ROWS, ROWS, resume=True, **LONG).package
    whole = open_bank(tmp_path / "uninterrupted", bert, device="cpu").train("s", ROWS, ROWS, **LONG).package
    assert resumed.ref == "s@1"
    assert resumed.manifest.weights_sha256 == whole.manifest.weights_sha256


def test_a_run_that_failed_after_its_last_epoch_resumes_without_training(bank, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("adapterbank.storage.bank.Bank.put", full)
    with pytest.raises(OSError, match="No space"):
        bank.train("s", ROWS, ROWS, **LONG)
    monkeypatch.undo()
    steps = []
    assert bank.train("s", ROWS, ROWS, resume=True, watch=steps.append, **LONG).package.ref == "s@1"
    assert steps == []


def test_without_resume_the_run_starts_again_and_ends_the_same(bank, tmp_path, bert):
    interrupt(bank)
    steps = []
    again = bank.train("s", ROWS, ROWS, watch=steps.append, **LONG).package
    assert steps[0].step == 1
    whole = open_bank(tmp_path / "uninterrupted", bert, device="cpu").train("s", ROWS, ROWS, **LONG).package
    assert again.manifest.weights_sha256 == whole.manifest.weights_sha256
    assert kept(bank) == []


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 0.02}, {"epochs": 5}, {"train": ROWS[:-1]}])
def test_a_run_with_other_options_or_data_does_not_use_the_state(bank, change):
    interrupt(bank)
    notes = []
    arguments = {"task": "s", "train": ROWS, "dev": ROWS, **LONG, **change}
    bank.train(**arguments, resume=True, note=notes.append)
    assert notes[0] == "There is no unfinished run of this config and data; training starts at the first epoch."
    assert len(kept(bank)) == 1


# --- the state on disk --------------------------------------------------------------------------------------


def state(epoch, best=1):
    tensors = {part: {"head.weight": torch.full((2, 3), float(epoch))} for part in ("weights", "first", "second")}
    history = [{"loss": 1.0, "score": 0.5, "seconds": 0.1}] * epoch
    return RunState(epoch, 3 * epoch, history, best, {**tensors, "best": tensors["weights"]})


def test_load_returns_the_last_saved_state_which_is_the_only_one_on_disk(tmp_path):
    for epoch in (1, 2):
        run_state.save(tmp_path / "run", state(epoch))
    found = run_state.load(tmp_path / "run")
    assert (found.epoch, found.step, found.history, found.best_epoch) == (2, 6, state(2).history, 1)
    assert set(found.tensors) == {"weights", "first", "second", "best"}
    assert all(torch.equal(tensors["head.weight"], torch.full((2, 3), 2.0)) for tensors in found.tensors.values())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["epoch-2.safetensors", "state.json"]
    run_state.forget(tmp_path / "run")
    assert run_state.load(tmp_path / "run") is None
    assert not (tmp_path / "run").exists()


def test_an_interrupted_save_keeps_the_previous_state(tmp_path, monkeypatch):
    run_state.save(tmp_path / "run", state(1))
    with monkeypatch.context() as broken:
        broken.setattr(run_state.files, "write_json", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_state.save(tmp_path / "run", state(2))
    assert run_state.load(tmp_path / "run").epoch == 1


def flip(folder):
    file = folder / "epoch-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def forged(change=lambda about: None, tensors=lambda flat: flat):
    """Return a damage with checksums that fit."""

    def damage(folder):
        file = folder / "epoch-1.safetensors"
        data = safetensors.torch.save(tensors(safetensors.torch.load(file.read_bytes())))
        file.write_bytes(data)
        about = json.loads((folder / "state.json").read_text())
        del about["checksum"]
        about |= {"sha256": files.sha256_bytes(data), "bytes": len(data)}
        change(about)
        files.write_json(folder / "state.json", reading.seal(about))

    return damage


def first_changed(change):
    """Return a change of the first tensor of a state."""

    def changed(flat):
        name = min(flat)
        return {**flat, name: change(flat[name])}

    return changed


FORGED = {
    "a step that is text": forged(lambda about: about.update(step="x")),
    "a best epoch that was not run": forged(lambda about: about.update(best_epoch=5)),
    "a negative best epoch": forged(lambda about: about.update(best_epoch=-3)),
    "no history": forged(lambda about: about.update(history=[])),
    "a history of numbers": forged(lambda about: about.update(history=[3])),
    "more epochs than the run has": forged(lambda about: about.update(epoch=9, history=9 * about["history"])),
    "a tensor too few": forged(tensors=lambda flat: {name: flat[name] for name in sorted(flat)[1:]}),
    "no tensors": forged(tensors=lambda flat: {}),
    "a name without a part": forged(tensors=lambda flat: {name.replace("/", ""): flat[name] for name in flat}),
    "another shape": forged(tensors=first_changed(lambda tensor: torch.zeros(3))),
    "whole numbers": forged(tensors=first_changed(lambda tensor: tensor.long())),
    "nan": forged(tensors=first_changed(lambda tensor: tensor * torch.nan)),
}
DAMAGES = {
    **FORGED,
    "state.json cut off": lambda folder: (folder / "state.json").write_text('{"epoch": 1, '),
    "state.json of another shape": lambda folder: (folder / "state.json").write_text("[]"),
    "state.json without fields": lambda folder: (folder / "state.json").write_text('{"epoch": 1}'),
    "state.json with a path": lambda folder: (folder / "state.json").write_text('{"epoch": "../../x"}'),
    "weights cut off": lambda folder: (folder / "epoch-1.safetensors").write_bytes(b"\x08"),
    "weights missing": lambda folder: (folder / "epoch-1.safetensors").unlink(),
    "a byte of the weights flipped": flip,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_one_clear_error_and_does_not_prevent_a_new_run(bank, damage):
    interrupt(bank)
    (folder,) = kept(bank)
    DAMAGES[damage](folder)
    with pytest.raises(
        InputError, match=r"The state in .* cannot be read \(.*\); run again without --resume"
    ) as caught:
        bank.train("s", ROWS, ROWS, resume=True, **LONG)
    assert "\n" not in str(caught.value)
    assert bank.tasks() == []
    assert bank.train("s", ROWS, ROWS, **LONG).package.ref == "s@1"


# --- the shell ----------------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path, checkpoint):
    data = write(tmp_path / "train.csv", ROWS)
    encoder = checkpoint("bert")[0]
    return [
        "train",
        "--bank",
        tmp_path / "my bank",
        "--task",
        "s",
        "--train",
        data,
        "--dev",
        data,
        "--backbone",
        encoder,
    ]


def test_ctrl_c_prints_the_command_that_resumes_and_finishes_the_run(tmp_path, words, monkeypatch):
    with monkeypatch.context() as pressed:
        real, stop = Display.watch, stop_at(2)
        pressed.setattr(Display, "watch", lambda self, progress: (real(self, progress), stop(progress)))
        found = shell(*words, *flags(LONG))
    assert (found.code, found.out) == (130, "")
    first, second = found.err.splitlines()
    assert first == "adapterbank: stopped after epoch 1 of 4; the bank's tasks are unchanged. To resume:"
    assert second.strip().startswith(f"adapterbank train --bank '{tmp_path / 'my bank'}' --task s")
    assert second.endswith(" --resume")
    assert not (tmp_path / "my bank" / "tasks" / "s").exists()
    again = shell(*words, *flags(LONG), "--resume", "--json")
    assert (again.code, again.json["package"]) == (0, "s@1")
    assert again.err.splitlines()[0] == "note: Resuming after epoch 1."
    whole = shell("train", "--bank", tmp_path / "uninterrupted", *words[3:], *flags(LONG), "--json").json
    for name in ("metrics", "best_epoch"):
        assert again.json[name] == whole[name]


def test_resume_without_a_state_prints_a_note_and_starts_again(words):
    found = shell(*words, *flags(FAST), "--resume")
    assert found.code == 0
    note = found.err.splitlines()[0]
    assert note == "note: There is no unfinished run of this config and data; training starts at the first epoch."


def test_a_damaged_state_is_exit_code_2_in_one_line(tmp_path, words, monkeypatch):
    with monkeypatch.context() as pressed:
        pressed.setattr(Display, "watch", lambda self, progress: stop_at(2)(progress))
        shell(*words, *flags(LONG))
    (state_file,) = (tmp_path / "my bank" / "runs").glob("*/state.json")
    state_file.write_text("{")
    found = shell(*words, *flags(LONG), "--resume")
    assert (found.code, found.out, len(found.err.splitlines())) == (2, "", 1)
    assert "run again without --resume" in found.err


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_a_real_process_does_not_damage_the_bank(tmp_path, words, name):
    bank = tmp_path / "my bank"
    assert shell(*words, *flags(FAST)).code == 0
    before = snapshot(bank, without=["runs"])
    with process(*words, *flags({**FAST, "epochs": 5000, "seed": 1})) as running:
        for _ in range(18_000):
            if list((bank / "runs").glob("*/state.json")) or running.poll() is not None:
                break
            time.sleep(0.05)
        running.send_signal(getattr(signal, name))
        out, err = running.communicate(timeout=900)
    assert (running.returncode, out) == (130, "")
    assert err.startswith("adapterbank: stopped after epoch ")
    assert "Traceback" not in err
    assert snapshot(bank, without=["runs"]) == before
    assert shell("audit", "--bank", bank).code == 0


@pytest.mark.minilm
@pytest.mark.parametrize(
    "options", [{"method": "feature", "head_hidden": 8}, {"method": "top"}, {"layers": "3-5", "size": 8}]
)
def test_cached_lower_layers_do_not_change_a_resumed_run(minilm, tmp_path, options):
    """The real encoder and texts of many lengths show rounding differences if a row is computed in another batch."""
    rows = [("a film to watch again " * (1 + i % 5) + "!" * (i % 7), "ab"[i % 2]) for i in range(48)]
    fast = {"epochs": 2, "max_length": 32, **options}
    bank = open_bank(tmp_path / "bank", minilm, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        bank.train("s", rows, rows[:8], watch=stop_at(2, 1), **fast)
    resumed = bank.train("s", rows, rows[:8], resume=True, **fast)
    whole = open_bank(tmp_path / "whole", minilm, device="cpu").train("s", rows, rows[:8], **fast)
    assert resumed.package.manifest.weights_sha256 == whole.package.manifest.weights_sha256


def test_the_same_run_can_run_twice_at_the_same_time(bank):
    """The second run finds the folder claimed and saves its state in another one."""
    inner = []

    def start_another(progress):
        if progress.score is not None and not inner:
            inner.append(True)
            inner.append(open_bank(bank.path, bank.backbone, device="cpu").train("s", ROWS, ROWS, **LONG))

    outer = bank.train("s", ROWS, ROWS, watch=start_another, **LONG)
    assert (inner[1].package.ref, outer.package.ref) == ("s@1", "s@2")
    assert inner[1].package.manifest.weights_sha256 == outer.package.manifest.weights_sha256
    assert kept(bank) == []


def test_a_second_process_with_the_same_run_claims_a_folder_of_its_own(tmp_path):
    with run_state.own_folder(tmp_path, "one") as first, run_state.own_folder(tmp_path, "one") as second:
        assert first == tmp_path / "one"
        assert second != first
        for folder in (first, second):
            with files.claimed(folder) as free:
                assert not free, folder
    assert list(tmp_path.iterdir()) == []
