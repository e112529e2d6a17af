"""Promise: the tables in docs/ are those of the library, and every link and option in the documents exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from adapterbank import methods
from adapterbank.benchmarks.glue import SHEETS
from adapterbank.config import Config, parse, resolve
from adapterbank.encoder.windows import STRIDE
from adapterbank.inference.audit import TOLERANCES
from adapterbank.inference.rows import MIN_CACHED_ROWS
from adapterbank.kinds.table import KINDS
from adapterbank.methods import METHODS
from adapterbank.tasks.catalog import CATALOG

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
OPTIONS = {f.name: f for f in fields(Config)}


def table(heading):
    """Return the first table under a heading: the titles, and the rows by their first cell."""
    part = PAGE[PAGE.index(f"## {heading}\n") :]
    lines = re.search(r"(?:^\|.*\|\n)+", part, re.MULTILINE)[0].splitlines()
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return cells[0][1:], {row[0].strip("`"): row[1:] for row in cells[2:]}


def test_the_table_of_defaults_equals_the_defaults_of_the_library():
    titles, rows = table("Defaults")
    assert titles == ["adapter", "layernorm", "lora", "ia3", "fusion", "bitfit", "feature", "full", "top", "why"]
    assert sorted(titles[:-1]) == sorted(name for name, row in METHODS.items() if row.slot)
    named = {name.replace(" ", "_").replace("learning_rate", "lr"): values for name, values in rows.items()}
    assert set(named) == set(METHODS["adapter"].defaults)
    for option, values in named.items():
        for method, written in zip(titles[:-1], values, strict=False):
            default = METHODS[method].defaults[option].value
            if isinstance(default, bool):
                assert written == ("on" if default else "off")
            elif isinstance(default, str):
                assert written == default
            else:
                assert float(written) == default, (option, method)
        assert values[-1], f"{option} has no reason"
    assert all(default.reason for row in METHODS.values() for default in row.defaults.values())


def test_a_config_resolves_to_the_defaults_in_the_table():
    _, rows = table("Defaults")
    titles, _ = table("Defaults")
    for column, method in enumerate(titles[:-1]):
        found = resolve(parse({"method": method, **({"fuse": "a,b"} if method == "fusion" else {})}))
        assert float(rows["learning rate"][column]) == found.lr
        assert int(rows["epochs"][column]) == found.epochs


def test_the_defaults_common_to_all_methods_are_documented():
    sentence = next(line for line in PAGE.splitlines() if line.startswith("Common to all:"))
    config = Config()
    for part in (
        f"batch {config.batch},",
        f"warmup over {100 * config.warmup:.0f} %",
        f"gradient clip {config.clip},",
        f"max length {config.max_length},",
        f"size {config.size} ",
        f"σ = {config.sigma:.0e}".replace("e-0", "e-"),
        "tanh-GELU",
    ):
        assert part in sentence, part
    assert config.activation == "gelu_tanh"


def test_the_table_of_variants_lists_the_adapters_options_and_their_values():
    _, rows = table("Variants of the adapter")
    listed = {name.removeprefix("--").removeprefix("no-").replace("-", "_"): values for name, values in rows.items()}
    assert set(listed) == {*METHODS["adapter"].uses}
    for name, (values, what) in listed.items():
        meta = OPTIONS[name].metadata
        assert what
        if meta["choices"]:
            assert values == ", ".join(meta["choices"])
        elif meta["low"] is not None:
            assert values == f"{meta['low']:g} … {meta['high']:g}"
    assert methods.MAX_SIZE == 4096


@pytest.mark.parametrize(
    ("heading", "method"),
    [("Low-rank parts", "lora"), ("Fuse tasks", "fusion"), ("Without an encoder", "automl")],
    ids=["lora", "fusion", "automl"],
)
def test_the_options_of_a_method_are_documented_with_their_defaults(heading, method):
    _, rows = table(heading)
    listed = {name.removeprefix("--").replace("-", "_"): values for name, values in rows.items()}
    assert set(listed) == set(METHODS[method].uses)
    for name, (default, what) in listed.items():
        value = OPTIONS[name].default
        assert default == (f"{value:g}" if isinstance(value, float) else str(value)), name
        assert what


def test_the_kinds_of_task_are_documented_with_their_metrics():
    _, rows = table("Kinds of task")
    assert list(rows) == list(KINDS)
    for kind, (_, default, others) in rows.items():
        assert default == KINDS[kind].metrics[0]
        assert {default, *others.split(", ")} <= set(KINDS[kind].metrics)


def test_the_tolerance_of_the_audit_is_documented():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for precision, tolerance in TOLERANCES.items():
        written = f"{tolerance:.0e}".replace("e-0", "e-") if tolerance < 0.01 else f"{tolerance:g}"
        assert f"{written} for {precision}" in design


def test_the_tasks_and_numbers_in_the_data_guide_are_those_of_the_library():
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:glue|squad|paper)/[a-z0-9_-]+", text))
    assert len(named) > 8
    assert named - {"glue/mnli=mine"} <= set(CATALOG)
    assert f"{len(CATALOG)} tasks" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(sheet.file in text for sheet in SHEETS)
    assert f"{STRIDE}, and at most half a window" in text
    assert f"Tokenised data of {MIN_CACHED_ROWS:,} rows or more" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_to_a_file(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (document.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_on_a_public_task_names_the_data_root(document):
    for block in re.findall(r"```\w*\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        for line in re.findall(r"^(?:\$ )?adapterbank .*", block, re.MULTILINE):
            if re.search(r"\b(?:glue|squad|paper)/|adapterbank (?:catalog|glue-submission)", line):
                exported = "export ADAPTERBANK_DATA=" in block[: block.index(line)]
                assert exported or "--data-root " in line or "--data " in line, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_option_of_train_in_the_documents_exists(document):
    known = {name.replace("_", "-") for name in OPTIONS} | {
        *("bank", "resume", "json", "config", "help", "prune", "tolerance", "recompute")
    }
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"adapterbank train .*", text):
        for name in re.findall(r" --([a-z-]+)", line):
            assert name in known or name.removeprefix("no-") in known, line
