"""Promise: every mistake exits with 2 and one line that names the value and the remedy; the bank is unchanged."""

from __future__ import annotations

import errno
import os
import re
import shutil

import pytest

from families import save_random
from small_data import FAST, flags, process, reviews, scores, shell, snapshot, write

ROWS = reviews()
HEADER = b"text,label\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint):
    """Return a folder with a bank of two versions of a task and the training data; tests work on copies."""
    folder = tmp_path_factory.mktemp("errors")
    data = write(folder / "train.csv", ROWS)
    words = ["--task", "s", "--train", data, "--dev", data, "--backbone", checkpoint("bert")[0]]
    for seed in (0, 1):
        assert shell("train", "--bank", folder / "bank", *words, *flags(FAST), "--seed", seed).code == 0
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """Work in a folder with a bank, good data, and every sort of bad data."""
    shutil.copytree(made / "bank", tmp_path / "bank")
    shutil.copy(made / "train.csv", tmp_path)
    write(tmp_path / "scores.csv", scores())
    files = {
        "empty.csv": b"",
        "blank.csv": b" \n\n",
        "header.csv": HEADER,
        "no-label.csv": b"id,text,other\n1,the cat,x\n2,a dog,y\n",
        "one-class.csv": HEADER + b"".join(f"{text},same\n".encode() for text, _ in ROWS),
        "unseen.csv": HEADER + b"the cat,positive\nthe dog,neutral\n",
        "latin1.csv": HEADER + "caf\xe9,positive\nthe dog,negative\n".encode("latin1"),
        "nul.csv": HEADER + b"the cat,positive\nthe\0dog,negative\n",
        "no-texts.csv": HEADER + b",positive\n ,negative\n",
        "words.csv": HEADER + b"the cat,0.5\nthe dog,much\n",
        "ragged.csv": HEADER + b"the cat, it sat,positive\n",
        "quote.csv": HEADER + b'"the cat,positive\n',
        "bad.jsonl": b'{"text": "the cat", "label": "a"}\n{"text": \n',
        "bad.parquet": b"PAR1 no",
        "data.xlsx": b"PK",
        "run.yaml": b"sise: 4\n",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(**changes):
    """Return the arguments of a training that would succeed, with changes; None leaves out an option."""
    good = {"task": "s", "train": "train.csv", "dev": "train.csv", **FAST}
    return ["train", *flags({name: value for name, value in {**good, **changes}.items() if value is not None})]


TRAINING = {
    "missing file": (trained(train="trian.csv"), r"There is no file trian\.csv; did you mean train\.csv"),
    "missing folder": (trained(train="no/train.csv"), r"There is no file no/train\.csv, and no folder no; check"),
    "folder": (trained(train="folder"), r"folder is a folder; name a file in it"),
    "empty file": (trained(train="empty.csv"), r"empty\.csv is empty; it needs rows"),
    "blank file": (trained(train="blank.csv"), r"blank\.csv is empty; it needs rows"),
    "only a header": (trained(train="header.csv"), r"header\.csv has columns \(text, label\) but no rows; add"),
    "no label column": (trained(train="no-label.csv"), r"no-label\.csv has no column .* --label.*: id, text, other\."),
    "missing column": (trained(text="sentense"), r"no column 'sentense'\. Choose with --text from: text, label\."),
    "missing label column": (trained(label="lable"), r"no column 'lable'\. Did you mean 'label'\? Choose with --label"),
    "a single class": (trained(train="one-class.csv"), r"every row has the label 'same'.*add rows with another"),
    "dev label never seen": (
        trained(dev="unseen.csv"),
        r"unseen\.csv, row 2: the label 'neutral' is not one of",
    ),
    "test label never seen": (trained(test="unseen.csv"), r"unseen\.csv, row 2: the label 'neutral' is not one of"),
    "NUL bytes": (trained(train="nul.csv"), r"nul\.csv has a NUL byte on line 3.*save it as UTF-8"),
    "all rows empty": (trained(train="no-texts.csv"), r"no-texts\.csv: .*(empty|no row)"),
    "dev rows all empty": (trained(dev="no-texts.csv"), r"no-texts\.csv: every row is empty in text; choose another"),
    "a label that is no number": (
        trained(train="words.csv", kind="regression"),
        r"words\.csv, row 2: 'much' in column 'label' is not a finite number.*correct the row",
    ),
    "a comma too many": (trained(train="ragged.csv"), r"ragged\.csv, line 2: 3 fields, but the header has 2; quote"),
    "an open quote": (trained(train="quote.csv"), r"quote\.csv, line 2: .*close every quote"),
    "broken JSON": (trained(train="bad.jsonl"), r"bad\.jsonl, line 2, column \d+: not valid JSON"),
    "broken Parquet": (trained(train="bad.parquet"), r"bad\.parquet cannot be read as a Parquet file.*write it again"),
    "unknown ending": (trained(train="data.xlsx"), r"data\.xlsx has the extension '\.xlsx'.*save the table as one"),
    "task with a path": (trained(task="../s"), r"'\.\./s' cannot be a task name; use 1 to 100 of"),
    "absolute task": (trained(task="/etc/s"), r"'/etc/s' cannot be a task name"),
    "empty task": (trained(task=""), r"task is missing; give --task\."),
    "no task": (trained(task=None), r"task is missing; give --task\."),
    "no data": (trained(train=None), r"train is missing; give --train, or a task that adapterbank catalog lists\."),
    "no such task of the catalog": (
        trained(task="glue/mprc", train=None),
        r"train is .* Did you mean --task glue/mrpc\?",
    ),
    "a task of the catalog that is nowhere": (
        trained(task="paper/airline", train=None),
        r"'paper/airline' was not found .*--data-root or ADAPTERBANK_DATA\); it is read from cf_airline/train",
    ),
    "a data root that is no folder": (
        trained(task="glue/mrpc", train=None, data_root="nowhere"),
        r"--data-root is 'nowhere', which is not a folder",
    ),
    "a column of a task of the catalog": (
        trained(task="glue/mrpc", train=None, text="sentence1"),
        r"text is 'sentence1', but 'glue/mrpc' has its own in the catalog; leave it out\.",
    ),
    "size too small": (trained(size=0), r"size is 0; it must be from 1 to 4096\."),
    "size too large": (trained(size=4097), r"size is 4097; it must be from 1 to 4096\."),
    "size that is no number": (trained(size="four"), r"size is 'four'; it must be a whole number, widths by layer"),
    "layer out of range": (trained(layers="1,3"), r"layers is '1,3', but this backbone has layers 0 to 2\."),
    "layers in the wrong order": (trained(layers="2-1"), r"layers is '2-1'"),
    "too many top layers": (
        trained(method="top", size=None, top=4),
        r"top is 4, but this backbone has 3 layers; use 1 to 3\.",
    ),
    "too long for the encoder": (trained(max_length=65), r"max_length is 65, but .* has 64 positions; lower it\."),
    "unknown method": (trained(method="adaptor"), r"method is 'adaptor'.* Did you mean 'adapter'\?"),
    "unknown kind": (trained(kind="multi-label"), r"kind is 'multi-label'.* Did you mean 'multilabel'\?"),
    "unknown metric": (trained(metric="acuracy"), r"metric is 'acuracy'.* Did you mean 'accuracy'\?"),
    "metric of another kind": (trained(metric="spearman"), r"spearman.*classification"),
    "an option of another method": (
        trained(method="full"),
        r"size is 4, but method 'full' does not use it; leave it",
    ),
    "unknown backbone": (trained(backbone="minilmm"), r"'minilmm' is neither a folder,.* See: adapterbank backbones"),
    "backbone that is a file": (trained(backbone="train.csv"), r"train\.csv is a file\. A backbone is a folder"),
    "backbone without weights": (trained(backbone="folder"), r"folder has no config\.json, so it is not a backbone"),
    "a typo in an option": (
        [*trained(), "--epoch", "3"],
        r"No such option: --epoch .*--epochs.* See: adapterbank train --help",
    ),
    "an option without its value": ([*trained(), "--seed"], r"Option '--seed' requires an argument"),
    "a word too many": ([*trained(), "more"], r"unexpected extra argument.*more.* See: adapterbank train --help"),
    "a typo in a config file": (
        trained(config="run.yaml"),
        r"'sise' is not an option of a run\. Did you mean 'size'\?",
    ),
    "no config file": (trained(config="rum.yaml"), r"There is no config file rum\.yaml\."),
    "unknown device": (trained(device="gpu"), r"device is 'gpu'; it must be auto, cpu, cuda or cuda:N\."),
    "unknown precision": (
        trained(precision="fp16"),
        r"precision is 'fp16'; it must be one of auto, fp32, bf16, int8\.",
    ),
}


def refused(found, message):
    """Assert that a command exited with 2 and printed one line to standard error, and nothing else."""
    assert found.code == 2, found
    assert found.out == ""
    lines = found.err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("adapterbank: ")
    assert re.search(message, lines[0]), lines[0]


@pytest.mark.parametrize("mistake", TRAINING)
def test_a_mistake_in_training_is_rejected_and_the_bank_is_unchanged(here, mistake, checkpoint):
    words, message = TRAINING[mistake]
    before = snapshot(here / "bank")
    refused(shell("train", "--bank", "bank", *words[1:]), message)
    assert snapshot(here / "bank") == before
    encoder = [] if "--backbone" in words else ["--backbone", checkpoint("bert")[0]]
    refused(shell("train", "--bank", "new", *encoder, *words[1:]), message)
    assert not (here / "new").exists()


def test_all_mistakes_are_reported_together_one_per_line(here):
    found = shell(*trained(size="x", lr=-1), "--bank", "bank", "--sites", "knee", "--warmup", "2")
    assert (found.code, found.out) == (2, "")
    options = [line.removeprefix("adapterbank: ").split(" is ")[0] for line in found.err.splitlines()]
    assert options == ["size", "lr", "warmup", "sites"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Return an encoder of the same shape with other weights."""
    folder = tmp_path_factory.mktemp("stranger")
    save_random("bert", folder, seed=1)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        trained(),
        ["predict", "--task", "s", "--text", "good"],
        ["evaluate", "--task", "s", "--data", "train.csv"],
        ["audit"],
    ],
    ids=lambda words: words[0],
)
def test_a_bank_for_another_backbone_is_rejected(here, stranger, words):
    before = snapshot(here / "bank")
    message = r"The bank bank is for .*, but the backbone given is .*; use the same encoder, or another bank\."
    refused(shell(*words, "--bank", "bank", "--backbone", stranger), message)
    assert snapshot(here / "bank") == before


USES = {
    "predict": ["predict", "--task", "s", "--text", "good"],
    "evaluate": ["evaluate", "--task", "s", "--data", "train.csv"],
    "show": ["show", "--task", "s"],
}


@pytest.mark.parametrize("use", ["predict", "evaluate"])
def test_a_package_with_changed_weights_is_rejected(here, use):
    file = here / "bank" / "tasks" / "s" / "2" / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)
    before = snapshot(here / "bank")
    refused(shell(*USES[use], "--bank", "bank"), r"s/2/weights\.safetensors has been changed.*restore it from")
    assert shell(use, *USES[use][1:], "--task", "s@1", "--bank", "bank").code == 0
    assert snapshot(here / "bank") == before


@pytest.mark.parametrize("use", USES)
def test_a_package_with_a_changed_manifest_is_rejected(here, use):
    file = here / "bank" / "tasks" / "s" / "2" / "manifest.json"
    file.write_text(file.read_text().replace('"seed": 1', '"seed": 2'))
    refused(shell(*USES[use], "--bank", "bank"), r"s/2/manifest\.json was changed after it was written; restore it")


def test_a_damaged_package_can_be_removed(here):
    (here / "bank" / "tasks" / "s" / "2" / "manifest.json").write_text("{")
    assert shell("remove", "--bank", "bank", "--task", "s@2", "--yes").out == "Removed s, version 2.\n"
    assert shell("audit", "--bank", "bank").code == 0


def test_a_bank_with_a_damaged_bank_file_is_rejected(here):
    (here / "bank" / "bank.json").write_text("{")
    for words in (trained(), ["tasks"], ["audit"], ["predict", "--task", "s", "--text", "good"]):
        refused(shell(*words, "--bank", "bank"), r"bank/bank\.json is damaged; restore it from a copy")


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_and_the_bank_is_unchanged(here, monkeypatch):
    before = snapshot(here / "bank", without=["runs"])
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        refused(shell(*trained(), "--bank", "bank"), r"cannot be used: the disk is full; free some space there and try")
    assert snapshot(here / "bank", without=["runs"]) == before
    assert shell(*trained(), "--bank", "bank").code == 0


def test_a_disk_that_is_full_when_the_package_is_written_leaves_the_bank_unchanged(here, monkeypatch):
    before = snapshot(here / "bank", without=["runs"])
    with monkeypatch.context() as disk:
        disk.setattr("adapterbank.training.run_state.save", lambda *_: None)
        disk.setattr(os, "fsync", full)
        words = trained(train="scores.csv", dev="scores.csv")
        refused(shell(*words, "--bank", "bank"), r"bank/tasks/.* cannot be used: the disk is full")
    assert snapshot(here / "bank", without=["runs"]) == before


def test_a_full_disk_creates_no_bank(here, monkeypatch, checkpoint):
    monkeypatch.setattr(os, "fsync", full)
    refused(shell(*trained(), "--bank", "new", "--backbone", checkpoint("bert")[0]), r"new/bank\.json cannot be used")
    assert not (here / "new" / "bank.json").exists()


def test_an_output_file_that_cannot_be_written_is_reported(here):
    words = ["predict", "--bank", "bank", "--task", "s", "--text", "good", "--output"]
    refused(shell(*words, "no/such/answers.jsonl"), r"no/such/answers\.jsonl cannot be used: No such file or directory")
    refused(shell(*words, "folder"), r"folder cannot be used: Is a directory")


def test_a_bank_without_write_permission_is_reported(here, monkeypatch, checkpoint):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("pathlib.Path.mkdir", denied)
    words = [*trained(), "--bank", "folder/bank", "--backbone", checkpoint("bert")[0]]
    refused(shell(*words), r"folder/bank cannot be used: permission is denied; change the permissions")
    assert snapshot(here / "folder") == {}


ASKING = {
    "two sources": (
        ["predict", "--task", "s", "--text", "good", "train.csv"],
        r"either texts with --text, or one FILE",
    ),
    "no source": (["predict", "--task", "s"], r"Give either texts with --text, or one FILE"),
    "no task": (["predict", "--text", "good"], r"Give either --task, or --task-column"),
    "two tasks": (
        ["predict", "--task", "s", "--task-column", "t", "train.csv"],
        r"Give either --task, or --task-column",
    ),
    "a task column without a file": (["predict", "--task-column", "t", "-"], r"--task-column needs a FILE"),
    "no such task column": (["predict", "--task-column", "task", "train.csv"], r"no column 'task'.*--task-column"),
    "a second text for a file": (
        ["predict", "--task", "s", "--text-pair", "a", "train.csv"],
        r"--text-pair requires --text",
    ),
    "fewer second texts": (
        ["predict", "--task", "s", "--text", "a", "--text", "b", "--text-pair", "c"],
        r"There are 2 --text and 1 --text-pair; give the same number of both",
    ),
    "a second text for single texts": (
        ["predict", "--task", "s", "--text", "a", "--text-pair", "b"],
        r"pass no second texts",
    ),
    "unknown task": (
        ["predict", "--task", "sent", "--text", "good"],
        r"'sent' is not a task of this bank.*There are for example: s",
    ),
    "unknown version": (["predict", "--task", "s@9", "--text", "good"], r"'s' has no version 9; its versions are 1, 2"),
    "no version": (["show", "--task", "s@x"], r"'s@x' has no version after the @; write a number, as in 's@1'"),
    "a path for a task": (["show", "--task", "../s"], r"'\.\./s' cannot be a task name"),
    "missing texts": (["predict", "--task", "s", "none.txt"], r"There is no file none\.txt"),
    "texts in no column": (["predict", "--task", "s", "no-texts.csv", "--device", "tpu"], r"device is 'tpu'"),
    "unknown precision": (["predict", "--task", "s", "--text", "a", "--precision", "fp8"], r"precision is 'fp8'"),
    "evaluate without a file": (["evaluate", "--task", "s", "--data", "none.csv"], r"There is no file none\.csv"),
    "evaluate an unseen label": (["evaluate", "--task", "s", "--data", "unseen.csv"], r"'neutral' is not one of"),
    "remove an unknown task": (["remove", "--task", "t", "--yes"], r"'t' is not a task of this bank"),
    "remove an unknown version": (["remove", "--task", "s@7", "--yes"], r"'s' has no version 7; its versions are 1, 2"),
    "remove without --yes": (["remove", "--task", "s"], r"This would remove s, version 1, 2; add --yes to confirm\."),
    "roll back to nowhere": (["rollback", "--task", "s", "--to", "5"], r"'s' has no version 5; its versions are 1, 2"),
    "roll back to a word": (["rollback", "--task", "s", "--to", "x"], r"'--to'.* See: adapterbank rollback --help"),
}


@pytest.mark.parametrize("mistake", ASKING)
def test_a_mistake_in_another_command_is_rejected_and_the_bank_is_unchanged(here, mistake):
    words, message = ASKING[mistake]
    before = snapshot(here / "bank")
    refused(shell(*words, "--bank", "bank", input="the cat\n"), message)
    assert snapshot(here / "bank") == before


BANK_COMMANDS = {
    "predict": ["predict", "--task", "s", "--text", "good"],
    "evaluate": ["evaluate", "--task", "s", "--data", "train.csv"],
    "tasks": ["tasks"],
    "show": ["show", "--task", "s"],
    "remove": ["remove", "--task", "s", "--yes"],
    "rollback": ["rollback", "--task", "s"],
    "audit": ["audit"],
    "gc": ["gc"],
    "serve": ["serve", "--port", "0"],
}


@pytest.mark.parametrize("name", BANK_COMMANDS)
def test_a_missing_bank_is_named_and_not_created(here, name):
    refused(shell(*BANK_COMMANDS[name], "--bank", "nowhere"), r"nowhere does not exist; ")
    refused(shell(*BANK_COMMANDS[name], "--bank", "folder"), r"folder is not a bank: it has no bank\.json; ")
    refused(shell(*BANK_COMMANDS[name], "--bank", "train.csv"), r"train\.csv is a file, and a bank is a folder; choose")
    assert not (here / "nowhere").exists()
    assert snapshot(here / "folder") == {}


@pytest.mark.parametrize("name", BANK_COMMANDS)
def test_a_missing_bank_option_is_reported(name):
    refused(shell(*BANK_COMMANDS[name]), rf"Missing option '--bank'\. See: adapterbank {name} --help")


def test_a_folder_with_other_files_does_not_become_a_bank(here, checkpoint):
    (here / "folder" / "photo.jpg").write_bytes(b"x")
    words = [*trained(), "--bank", "folder", "--backbone", checkpoint("bert")[0]]
    refused(shell(*words), r"folder contains other files and is not a bank; choose an empty or new folder\.")
    assert list(snapshot(here / "folder")) == ["photo.jpg"]


def test_a_name_too_long_for_the_system_is_one_line(here):
    refused(shell("tasks", "--bank", "x" * 300), r"x+ cannot be used: File name too long")


def test_a_typo_in_a_command_suggests_the_nearest():
    refused(shell("trian"), r"No such command 'trian'\. Did you mean 'train'\? See: adapterbank --help")


def test_texts_that_are_not_utf8_have_an_error_and_the_others_an_answer(here):
    found = shell("predict", "--bank", "bank", "--task", "s", "-", input=b"caf\xc3\xa9 \xff\nthe dog\n")
    assert found.code == 1
    assert "Standard input, line 1: byte 0xff is not UTF-8" in found.err
    assert ["error" in one for one in found.answers] == [True, False]


def test_empty_standard_input_is_reported(here):
    refused(shell("predict", "--bank", "bank", "--task", "s", "-", input=b""), r"Standard input is empty; pipe in")


def test_a_real_process_prints_no_traceback(here):
    found = []
    for words in (trained(size=0), [*trained(), "--epoch", "3"], ["tasks"]):
        bank = ["--bank", "nowhere"] if words == ["tasks"] else ["--bank", "bank"]
        with process(*words, *bank) as running:
            out, err = running.communicate(timeout=900)
        found.append((running.returncode, out, err.count("\n"), err.split(":")[0]))
    assert found == [(2, "", 1, "adapterbank")] * 3
