"""Promise: users import exactly these names, and importing the package loads nothing heavy."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import adapterbank

ROOT = Path(__file__).parents[1]
PUBLIC = {
    *("AdapterClassifier", "AdapterbankError", "AsyncClient", "Client", "OpenBank", "Prediction"),
    *("__version__", "load_backbone", "open_bank"),
    *("Ask", "Bank", "BankService", "Engine", "Service", "ServiceError", "TrainingError", "create_app"),
    *("choose_settings", "comparison_tables", "draw_figures", "figure_data", "load_runs"),
    *("read_records", "render_report"),
}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_public_names_are_exactly_these():
    assert set(adapterbank.__all__) == PUBLIC
    assert adapterbank.__all__ == sorted(adapterbank.__all__)
    assert set(dir(adapterbank)) == PUBLIC


def test_every_public_name_exists_and_has_a_docstring():
    for name in PUBLIC:
        found = getattr(adapterbank, name)
        assert isinstance(found, str) or inspect.getdoc(found)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'adapterbank' has no attribute 'teach'"):
        adapterbank.teach  # noqa: B018


def test_every_public_method_has_a_docstring():
    methods = {name: getattr(adapterbank.OpenBank, name) for name in dir(adapterbank.OpenBank) if name[0] != "_"}
    assert set(methods) == {
        *("ablate", "audit", "backbone", "bank", "engine", "evaluate", "gc", "glue_score", "glue_submission"),
        *("predict", "predict_file", "prune", "read", "remove", "rollback", "show", "soup"),
        *("squad", "sweep", "tasks", "teach_together", "train"),
    }
    assert all(inspect.getdoc(value) for value in methods.values())


def test_the_readme_uses_public_names_and_methods_only():
    assert set(re.findall(r"\badapterbank\.(\w+)\(", README)) <= PUBLIC
    assert set(re.findall(r"\bbank\.(\w+)\(", README)) <= set(dir(adapterbank.OpenBank))


def test_modules_that_the_documentation_once_named_can_still_be_imported():
    from adapterbank import records, selection

    assert (records.read_all, selection.choose) == (adapterbank.read_records, adapterbank.choose_settings)


def test_the_documentation_of_studies_and_analyses_uses_public_names_only():
    for path in (ROOT / "docs" / "studies.md", ROOT / "docs" / "analysis.md"):
        code = "\n".join(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
        assert not re.findall(r"from adapterbank\.[\w.]+ import .*", code), path.name
        assert set(re.findall(r"\badapterbank\.(\w+)", code)) <= PUBLIC, path.name


def test_a_star_import_brings_exactly_the_public_names():
    names = {}
    exec("from adapterbank import *", names)
    assert set(names) - {"__builtins__"} == PUBLIC


def test_importing_loads_nothing_heavy():
    code = "import adapterbank, sys; print(sorted({'torch', 'numpy', 'typer', 'rich', 'yaml'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert found.stdout == "[]\n"


def test_init_files_of_sub_packages_are_empty():
    found = sorted((ROOT / "src" / "adapterbank").glob("*/__init__.py"))
    assert len(found) >= 4
    assert [path.parent.name for path in found if path.read_bytes()] == []


def test_every_error_has_one_common_base():
    from adapterbank import errors

    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    raised = [value for value in classes if not issubclass(value, Warning)]
    assert {value.__name__ for value in classes} - {value.__name__ for value in raised} == {"SlowerWarning"}
    assert all(issubclass(value, adapterbank.AdapterbankError) for value in raised)
    assert {value.__name__: value.exit_code for value in raised if value.exit_code != 2} == {"TrainingError": 1}
    drawn = set(re.findall(r"(\w+(?:Error|Name|Damaged|Required|Mismatch)) ", errors.__doc__))
    assert drawn == {value.__name__ for value in raised}
