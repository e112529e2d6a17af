"""How to install what is missing, in the words of the tool that installed this library. Installs nothing itself."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

NAME = "adapterbank"


class Installer(NamedTuple):
    """A tool, and the commands by which it adds extras of this library and further packages."""

    extras: str
    package: str


_PIP = Installer("pip install {flag}{what}", "pip install --no-deps {what}")
_UV = Installer("uv pip install {flag}{what}", "uv pip install --no-deps {what}")
_TOOLS = {
    "pipx_metadata.json": Installer("pipx install --force {flag}{what}", f"pipx inject {NAME} {{what}}"),
    "uv-receipt.toml": Installer("uv tool install --force {flag}{what}", "uv tool install --with {what} {own}"),
}
"""The tools that give an application an environment of its own, by the file that each leaves in it."""


def extra_command(extra: str) -> str:
    """Return the command that adds an extra, such as `serve` or `ray,serve`, to this very installation."""
    flag, place = _source()
    at = place if place is None or place.startswith("/") else None
    what = f"{at}[{extra}]" if at else f"{NAME}[{extra}]" + (f" @ {place}" if place else "")
    return _installer().extras.format(flag=flag, what=_quoted(what))


def package_command(package: str) -> str:
    """Return the command that adds another package, without its dependencies, to this environment."""
    _, place = _source()
    return _installer().package.format(what=package, own=_quoted(place or NAME))


def _installer() -> Installer:
    """Return the tool that manages this environment."""
    for file, tool in _TOOLS.items():
        if Path(sys.prefix, file).is_file():
            return tool
    return _UV if (_read("INSTALLER") or "").strip() == "uv" else _PIP


def _source() -> tuple[str, str | None]:
    """Return the flag of an editable installation, and the folder or URL installed from; None for the index."""
    if (text := _read("direct_url.json")) is None:
        return "", None
    try:
        found = json.loads(text)
        url, folder = str(found["url"]), found.get("dir_info")
    except (ValueError, KeyError, TypeError, AttributeError):  # a file that no tool writes
        return "", None
    if folder is None:  # an archive, or a repository
        vcs = found.get("vcs_info", {}).get("vcs", "")
        return "", f"{vcs}+{url}" if vcs else url
    return "-e " if folder.get("editable") else "", unquote(urlsplit(url).path)


def _read(file: str) -> str | None:
    try:
        return metadata.distribution(NAME).read_text(file)
    except metadata.PackageNotFoundError:  # run from its sources
        return None


def _quoted(what: str) -> str:
    """Quote for a shell; brackets are quoted too, since some shells take them for a pattern."""
    return shlex.quote(what)
