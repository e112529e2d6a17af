"""Promise: the wheel holds the package and works with its declared dependencies and nothing else.

The empty environment gets the wheel alone, without pip or setuptools. Its dependencies are links to the packages of
the environment that runs the tests: those that the wheel's metadata names, and those that they name in turn. So an
import of something undeclared fails there, and torch is not downloaded again.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_string
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "adapterbank"

NO_TORCH = (
    *("analysis", "automl", "client", "config", "errors", "methods", "metrics", "storage", "tasks"),
    *("studies.grid", "studies.progress", "studies.selection", "training.dataset"),
)
"""Modules that work without torch, from the import contract in pyproject.toml."""

KERNELS = [
    f"adapterbank.encoder.kernels.{name}"
    for name in ("attention", "elementwise", "parts", "site", "site_gradient", "site_weights", "slots")
]
"""The modules that may import `triton`, which is not declared: CUDA builds of torch bring it, others do not need it.
They are imported on a GPU only, and what imports them works without them."""

SERVED = {"fastapi", "httpx", "prometheus_client", "pydantic", "starlette", "uvicorn"}
"""The packages of the extra `serve`. Others may bring `pydantic` and `httpx` without it."""

IMPORT_ALL = """
import importlib, pkgutil, sys
import adapterbank
names = [module.name for module in pkgutil.walk_packages(adapterbank.__path__, "adapterbank.")]
for name in names:
    if name not in sys.argv[1:]:
        importlib.import_module(name)
assert not set(sys.argv[1:]) & set(sys.modules), "imported without a GPU or the extra"
print(adapterbank.__file__, *names, sep="\\n")
"""
"""A script; its arguments are the modules that need more than the declared dependencies."""


class Installed(NamedTuple):
    """An environment that holds the wheel and its declared dependencies only."""

    folder: Path
    linked: frozenset[str]

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run outside the source tree and without its variables, so that only installed packages can be imported."""
        clean = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        words = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(words, cwd="/", env=clean, capture_output=True, text=True, check=False)


def command(words: list[str | Path]) -> None:
    """Run in this environment, and fail with its output when it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(project: Path, folder: Path) -> Path:
    command([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project])
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(wheel: Path, *, extra: str = "") -> list[Requirement]:
    """Read from the wheel what an installer would install beside it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [need for need in found if need.marker is None or need.marker.evaluate({"extra": extra})]


def closure(needs: list[Requirement]) -> dict[str, Distribution]:
    """Return the named distributions and all that they require in turn."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(need.name, extra) for need in needs for extra in ("", *need.extras)]
    while queue:
        name, extra = queue.pop()
        key = (canonicalize_name(name), extra)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution(name)
        for inner in map(Requirement, found[key[0]].requires or []):
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                queue += [(inner.name, more) for more in ("", *inner.extras)]
    return found


def link(distributions: dict[str, Distribution], folder: Path) -> None:
    """Link each distribution's top-level entries, its metadata among them, into an empty folder."""
    folder.mkdir()
    for dist in distributions.values():
        tops = {file.parts[0] for file in dist.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            target = Path(str(dist.locate_file(top)))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


def install(wheel: Path, folder: Path) -> Installed:
    """Create an environment with the wheel and links to what the wheel declares."""
    venv = folder / "venv"
    python = venv / "bin" / "python"
    command([sys.executable, "-m", "venv", "--without-pip", venv])
    command([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel])
    needed = closure(requirements(wheel))
    link(needed, folder / "linked")
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "linked.pth").write_text(f"{folder / 'linked'}\n", encoding="utf-8")
    return Installed(venv, frozenset(needed))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(wheel, tmp_path_factory.mktemp("empty"))


def source_modules() -> set[str]:
    """Return the import name of every module of the package."""
    return {module_name(file).removesuffix(".__init__") for file in SOURCE.rglob("*.py")}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)


def modules_of_the_extra() -> list[str]:
    """Return the modules that import packages of the extra `serve` at their top."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        tops = ast.parse(file.read_text(encoding="utf-8")).body
        named = {alias.name for node in tops if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module or "" for node in tops if isinstance(node, ast.ImportFrom)}
        if SERVED & {name.split(".")[0] for name in named}:
            found.append(module_name(file))
    return found


def test_only_modules_of_the_http_server_need_the_extra_serve() -> None:
    found = modules_of_the_extra()
    assert "adapterbank.serving.http.app" in found
    assert [name for name in found if not name.startswith("adapterbank.serving.")] == []
    rooms = ("adapterbank.serving.jobs.", "adapterbank.serving.service.", "adapterbank.serving.http.auth")
    assert [name for name in found if name.startswith(rooms)] == []


def test_the_wheel_holds_only_the_package_its_type_marker_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        licences = [archive.read(name) for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    code = {name for name in names if not re.match(r"adapterbank-[^/]+\.dist-info/", name)}
    on_disk = {
        f"adapterbank/{file.relative_to(SOURCE).as_posix()}"
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert "adapterbank/py.typed" in code
    assert code == on_disk
    assert licences == [(ROOT / "LICENSE").read_bytes()]


def test_every_module_imports_without_a_warning_with_the_declared_dependencies_alone(
    installed: Installed,
) -> None:
    done = installed.run("python", "-I", "-W", "error", "-c", IMPORT_ALL, *KERNELS, *modules_of_the_extra())
    assert done.returncode == 0, done.stderr
    origin, *names = done.stdout.split()
    assert Path(origin).is_relative_to(installed.folder)
    assert {"adapterbank", *names} == source_modules()


def test_help_works_with_the_declared_dependencies_alone(installed: Installed) -> None:
    done = installed.run("adapterbank", "--help")
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_that_environment_has_no_development_tools(installed: Installed) -> None:
    assert {"torch", "numpy", "typer"} <= installed.linked
    for name in ("transformers", "pytest", "hypothesis", "pip"):
        assert installed.run("python", "-I", "-c", f"import {name}").returncode == 1, name


def test_an_undeclared_import_would_be_found(tmp_path: Path) -> None:
    """A test of this file: a package that uses what it does not declare fails to import there."""
    package = tmp_path / "project" / "src" / "adapterbank"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "declared.py").write_text("import yaml\n", encoding="utf-8")
    (package / "undeclared.py").write_text("import pytest\n", encoding="utf-8")
    (tmp_path / "project" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "adapterbank"\nversion = "0"\ndependencies = ["pyyaml"]\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["src/adapterbank"]\n',
        encoding="utf-8",
    )
    there = install(build_wheel(tmp_path / "project", tmp_path / "dist"), tmp_path)
    assert there.linked == {"pyyaml"}
    assert there.run("python", "-I", "-c", "import adapterbank.declared").returncode == 0
    done = there.run("python", "-I", "-W", "error", "-c", IMPORT_ALL)
    assert done.returncode == 1
    assert "No module named 'pytest'" in done.stderr


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and top-level name of every absolute import, those inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]


def test_every_import_in_the_source_is_declared_by_name(wheel: Path) -> None:
    """Imports inside functions too, and those that another dependency happens to bring."""
    extras = ("", "automl", "data", "plot", "ray", "serve")
    needs = [need for extra in extras for need in requirements(wheel, extra=extra)]
    declared = {canonicalize_name(need.name) for need in needs}
    owners = packages_distributions()
    undeclared = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted(SOURCE.rglob("*.py"))
        for line, name in imports(file)
        if name != "adapterbank"
        and name not in sys.stdlib_module_names
        and not (name == "triton" and module_name(file) in KERNELS)
        and not declared & {canonicalize_name(owner) for owner in owners.get(name, [name])}
    ]
    assert undeclared == []


def test_every_declared_dependency_is_used(wheel: Path) -> None:
    used = {name for file in SOURCE.rglob("*.py") for _, name in imports(file)}
    owners = packages_distributions()
    used_distributions = {canonicalize_name(owner) for name in used for owner in owners.get(name, [])}
    assert {canonicalize_name(need.name) for need in requirements(wheel)} <= used_distributions


def test_importing_the_package_loads_no_torch(installed: Installed) -> None:
    done = installed.run("python", "-I", "-c", "import adapterbank, sys; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("module", NO_TORCH)
def test_a_module_that_works_without_torch_does_not_load_it(installed: Installed, module: str) -> None:
    below = sorted(name for name in source_modules() if f"{name}.".startswith(f"adapterbank.{module}."))
    assert below, f"adapterbank.{module} does not exist"
    code = "\n".join([*(f"import {name}" for name in below), "import sys; print('torch' in sys.modules)"])
    done = installed.run("python", "-I", "-c", code)
    assert done.stdout == "False\n", done.stderr


def test_constraints_pin_every_declared_dependency_within_its_range(wheel: Path) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    declared = requirements(wheel, extra="dev")
    missing = [str(need) for need in declared if not pins.get(canonicalize_name(need.name))]
    assert missing == []
    assert [str(need) for need in declared if pins[canonicalize_name(need.name)] not in need.specifier] == []
