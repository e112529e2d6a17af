"""`adapterbank train`: its options are the fields of a config, its output a summary or a record."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest

from adapterbank import config as configs
from adapterbank.api.opened import open_bank
from adapterbank.config import Config, resolve
from adapterbank.methods import METHODS
from adapterbank.storage import records
from adapterbank.storage.bank import Bank
from adapterbank.studies import size_search
from adapterbank.tasks import tables
from small_data import FAST, flags, process, reviews, scores, shell, tags, write

ROWS = reviews()
FIELDS = list(fields(Config))


@pytest.fixture
def here(tmp_path, monkeypatch):
    write(tmp_path / "train.csv", ROWS)
    write(tmp_path / "test.csv", reviews(8))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def encoder(checkpoint):
    return ["--backbone", checkpoint("bert")[0]]


def train(*words, task="s", data="train.csv", options=FAST):
    return shell("train", "--bank", "bank", "--task", task, "--train", data, *flags(options), *words)


# --- options ------------------------------------------------------------------------------------------------


def plain(text):
    """Return a help page without boxes and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─*]", " ", text).split())


@pytest.fixture(scope="module")
def page():
    """Return the help of `train` by option, printed wide enough for one line each."""
    found = shell("train", "--help", COLUMNS="400")
    assert found.code == 0
    return {line[: line.index(" ")]: line for raw in found.out.splitlines() if (line := plain(raw)).startswith("--")}


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_field_of_a_config_is_an_option_with_its_help_and_its_default(page, field):
    line = page[f"--{field.name.replace('_', '-')}"]
    assert field.metadata["help"] in line
    assert all(choice in line for choice in field.metadata["choices"])
    if field.name in METHODS["adapter"].defaults:
        for name, row in METHODS.items():
            if field.name not in row.defaults:
                continue
            value = row.defaults[field.name].value
            assert f"{name} {value}" in line or f"(default: {value})" in line
    elif field.default not in (None, ""):
        assert f"(default: {field.default})" in line or "(default: the bank's own; minilm for a new bank)" in line


def test_the_only_other_options_are_those_of_the_bank(page):
    own = {"--bank", "--config", "--resume", "--json", "--help", "--prune", "--tolerance", "--recompute"}
    assert set(page) == own | {f"--{f.name.replace('_', '-')}" for f in FIELDS}


def test_help_fits_a_narrow_terminal_and_has_an_example():
    found = shell("train", "--help", COLUMNS="80")
    assert max(map(len, found.out.splitlines())) <= 80
    assert "Example: adapterbank train --bank bank --task sentiment --train reviews.csv" in plain(found.out)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fusion"])  # which needs other tasks
def test_shell_and_python_train_with_the_same_defaults(here, encoder, bert, method):
    short = {"epochs": 1} if METHODS[method].slot else {"trials": 1}
    short |= {"max_length": 32, "method": method}
    config = train("--dev", "train.csv", "--json", "--device", "cpu", *encoder, options=short).json["config"]
    result = open_bank(here / "python", bert.name, device="cpu").train("s", "train.csv", "train.csv", **short)
    assert config == result.record["config"]
    defaults = resolve(configs.parse({"method": method})).to_json()
    given = {*short, "task", "train", "dev", "backbone", "device"}
    assert {k: v for k, v in config.items() if k not in given | {"data", "backbone_sha256"}} == {
        k: v for k, v in defaults.items() if k not in given
    }


def test_flags_can_be_turned_on_and_off(here, encoder):
    words = ["--no-train-norms", "--inner-norm", "--no-bias-correction", "--json"]
    found = train(*words, *encoder, options={**FAST, "epochs": 1}).json["config"]
    assert (found["train_norms"], found["inner_norm"], found["bias_correction"]) == (False, True, False)


def test_outputs_computed_again_change_neither_the_record_nor_the_weights(here, encoder):
    found = [train("--recompute", when, "--json", *encoder).json for when in ("always", "never")]
    for name in ("config", "metrics", "params"):
        assert found[0][name] == found[1][name]
    always, never = (Bank.open(here / "bank").get(f"s@{version}").tensors() for version in (1, 2))
    assert all((always[name] == never[name]).all() for name in never)
    refused = train("--recompute", "sometimes", *encoder)
    assert refused.code == 2
    assert "recompute is 'sometimes'; it must be one of auto, always, never" in refused.err


def test_the_command_line_overrides_a_config_file(here, encoder):
    (here / "run.yaml").write_text(
        f"task: y\ntrain: train.csv\nbackbone: {encoder[1]}\nsize: 4\nmax-length: 32\nseed: 3\n"
    )
    words = ["train", "--bank", "bank", "--config", "run.yaml", "--epochs", 1, "--seed", 5, "--json"]
    found = shell(*words).json
    assert found["package"] == "y@1"
    assert [found["config"][name] for name in ("size", "max_length", "epochs", "seed")] == [4, 32, 1, 5]


def test_the_paper_variants_train(here, encoder):
    variants = [
        *(["--placement", "parallel"], ["--combine", "multiply"], ["--depth", "2", "--inner-norm"]),
        *(["--layers", "upper", "--sites", "attention"], ["--activation", "relu", "--sigma", "0.1"]),
        *(["--pooling", "pooler"], ["--pooling", "first", "--head-hidden", "8"]),
    ]
    for number, words in enumerate(variants):
        found = train(*words, *encoder, task=f"v{number}", options={**FAST, "epochs": 1})
        assert (found.code, found.out.split()[0]) == (0, f"v{number}@1"), found
    assert shell("audit", "--bank", "bank").code == 0


# --- output -----------------------------------------------------------------------------------------------


def test_a_summary_names_the_package_the_scores_and_the_costs(here, encoder):
    found = train("--dev", "train.csv", "--test", "test.csv", *encoder)
    assert found.code == 0
    first, second, third = found.out.splitlines()
    assert re.fullmatch(r"s@1  accuracy [01]\.\d{4} on dev \(majority baseline: 0\.5000\), epoch \d", first)
    assert re.fullmatch(r"  accuracy [01]\.\d{4} on test", second)
    assert re.fullmatch(r"  2,266 trained parameters \(7\.59 % of the encoder\), 12\.8 kB, \d+ s, \d+ rows/s", third)


def test_json_is_the_record_and_nothing_else(here, encoder):
    found = train("--json", *encoder)
    assert found.code == 0
    (path,) = (here / "bank" / "records").iterdir()
    assert found.json == records.read(path)
    assert found.err.splitlines()[0] == "note: No dev data given: 2 of 24 training rows are held out for it."


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "metric"),
    [
        (scores(), ("text", "score"), "regression", "spearman"),
        ([(row["text"], "|".join(row["labels"])) for row in tags()], ("text", "labels"), "multilabel", "micro_f1"),
    ],
)
def test_other_kinds_are_inferred_from_the_labels(here, encoder, rows, columns, kind, metric):
    write(here / "other.csv", rows, columns)
    found = train("--dev", "other.csv", *encoder, data="other.csv")
    assert found.code == 0
    assert re.match(rf"s@1  {metric} -?\d\.\d{{4}} on dev, epoch \d", found.out)
    assert shell("show", "--bank", "bank", "--task", "s", "--json").json["task"]["kind"] == kind


def test_the_second_task_of_a_bank_uses_its_encoder_by_default(here, encoder):
    assert train(*encoder).code == 0
    assert train(task="t").code == 0
    (here / "run.yaml").write_text("size: 4\n")
    assert train("--config", "run.yaml", task="u").code == 0
    assert Bank.open("bank").names() == ["s", "t", "u"]


def test_training_a_task_again_makes_a_new_version_the_default(here, encoder):
    first, second = (train("--seed", seed, *encoder).out.split()[0] for seed in (0, 1))
    assert (first, second) == ("s@1", "s@2")
    assert Bank.open("bank").get("s").ref == "s@2"


def test_two_processes_train_into_one_new_bank_at_once(here, encoder):
    words = ["train", "--bank", "bank", "--train", "train.csv", "--dev", "train.csv", *encoder, "--json", *flags(FAST)]
    running = [process(*words, "--task", "s", "--seed", seed) for seed in (0, 1)]
    ended = [one.communicate(timeout=900) for one in running]
    assert [one.returncode for one in running] == [0, 0], ended
    assert sorted(json.loads(out)["package"] for out, _ in ended) == ["s@1", "s@2"]
    assert shell("audit", "--bank", "bank").code == 0


def test_the_data_is_read_once(here, encoder, monkeypatch):
    read, real = [], tables.read_table
    monkeypatch.setattr(tables, "read_table", lambda path, **form: (read.append(str(path)), real(path, **form))[1])
    monkeypatch.setattr(size_search, "SIZES", (2, 4))
    for words in ([], ["--prune"], ["--size", "auto", "--prune"], ["--method", "automl", "--trials", 1]):
        read.clear()
        options = {"epochs": 1, "max_length": 32} if "automl" not in words else {}
        assert train("--dev", "test.csv", *words, *encoder, options=options).code == 0
        assert read == ["train.csv", "test.csv"], words


# --- automatic size ---------------------------------------------------------------------------------------------


def test_a_config_file_can_request_an_automatic_size(one_task, monkeypatch):
    monkeypatch.setattr(size_search, "SIZES", (2, 4))
    options = {name: value for name, value in FAST.items() if name != "size"}
    (one_task / "auto.yaml").write_text("size: auto\ntask: a\ntrain: train.csv\n")
    found = shell("train", "--bank", "bank", "--config", "auto.yaml", *flags(options))
    assert found.code == 0, found
    assert "rung 3 of 3" in found.err
    assert (
        shell("train", "--bank", "bank", "--config", "auto.yaml", "--size", "2", *flags(options)).err.count("rung") == 0
    )


def test_training_with_an_automatic_size_reports_the_reason(one_task, monkeypatch):
    monkeypatch.setattr(size_search, "SIZES", (2, 4))
    options = {name: value for name, value in FAST.items() if name != "size"}
    words = ["train", "--bank", "bank", "--task", "a", "--train", "train.csv", *flags(options)]
    found = shell(*words, "--size", "auto", "--tolerance", 100, "--prune")
    assert found.code == 0, found
    assert "rung 3 of 3" in found.err
    assert "Size 2 (lr 0.01)" in found.err
    assert "Without the adapters of layers" in found.err
    assert found.out.startswith("a@2  accuracy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tolerance", "1"], "applies only to --size auto and --prune"),
        (["--size", "auto", "--tolerance", "much"], "tolerance is 'much'"),
        (["--size", "auto", "--tolerance", "-1"], "at least 0"),
        (["--size", "auto", "--resume"], "cannot be resumed"),
        (["--size", "automatic"], "size is 'automatic'"),
    ],
)
def test_mistakes_in_automatic_size_are_one_line_each(one_task, words, message):
    found = shell("train", "--bank", "bank", "--task", "a", "--train", "train.csv", *words)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.strip().splitlines()) == 1
