"""Tests of `adapterbank.install`: the command fits the way in which the library was installed."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from adapterbank.install import extra_command, package_command


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that makes an environment of files such as installers leave."""

    def make(*, installer="pip", source=None, receipt=None):
        folder = tmp_path / "site" / "adapterbank-0.1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: adapterbank\nVersion: 0.1.0\n")
        (folder / "INSTALLER").write_text(f"{installer}\n")
        if source is not None:
            (folder / "direct_url.json").write_text(source if isinstance(source, str) else json.dumps(source))
        if receipt:
            (tmp_path / receipt).write_text("")
        found = metadata.PathDistribution(folder)
        monkeypatch.setattr(metadata, "distribution", lambda name: found)
        monkeypatch.setattr(sys, "prefix", str(tmp_path))

    return make


EDITABLE = {"url": "file:///home/ann/my%20code/adapterbank", "dir_info": {"editable": True}}


@pytest.mark.parametrize(
    ("made", "extra", "package"),
    [
        ({}, "pip install 'adapterbank[serve]'", "pip install --no-deps gt"),
        ({"installer": "uv"}, "uv pip install 'adapterbank[serve]'", "uv pip install --no-deps gt"),
        (
            {"receipt": "pipx_metadata.json"},
            "pipx install --force 'adapterbank[serve]'",
            "pipx inject adapterbank gt",
        ),
        (
            {"receipt": "uv-receipt.toml", "installer": "uv"},
            "uv tool install --force 'adapterbank[serve]'",
            "uv tool install --with gt adapterbank",
        ),
        (
            {"source": EDITABLE},
            "pip install -e '/home/ann/my code/adapterbank[serve]'",
            "pip install --no-deps gt",
        ),
        (
            {"source": {"url": "file:///src/adapterbank", "dir_info": {}}},
            "pip install '/src/adapterbank[serve]'",
            "pip install --no-deps gt",
        ),
        (
            {"source": {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}},
            "pip install 'adapterbank[serve] @ git+https://example.org/a.git'",
            "pip install --no-deps gt",
        ),
        (
            {"source": {"url": "https://example.org/a-0.1.0.whl", "archive_info": {}}},
            "pip install 'adapterbank[serve] @ https://example.org/a-0.1.0.whl'",
            "pip install --no-deps gt",
        ),
        ({"source": "damaged"}, "pip install 'adapterbank[serve]'", "pip install --no-deps gt"),
    ],
    ids=["pip", "uv", "pipx", "uv-tool", "editable", "folder", "git", "wheel", "damaged"],
)
def test_the_command_fits_the_installation(installed, made, extra, package):
    installed(**made)
    assert extra_command("serve") == extra
    assert package_command("gt") == package
    what = shlex.split(extra_command("serve"))[-1]
    if not what.startswith("/"):
        assert Requirement(what).extras == {"serve"}


def test_without_metadata_the_index_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert extra_command("ray,serve") == "pip install 'adapterbank[ray,serve]'"
