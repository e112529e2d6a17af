"""The backbone: tensors by our names, tokenizer, identity, read from a folder. Knows no tasks and no slots."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from adapterbank.encoder.batch import Tokens, by_length, pack
from adapterbank.encoder.config_json import read_config
from adapterbank.encoder.families import FAMILIES, EncoderConfig, checkpoint_names
from adapterbank.encoder.forward import Frozen, forward, join_projections
from adapterbank.encoder.products import FrozenTensors
from adapterbank.encoder.sources import locate, weight_files
from adapterbank.encoder.tokenizer import read_tokenizer, tokenize
from adapterbank.errors import BackboneError, InputError
from adapterbank.storage.files import canonical_json

LOG = logging.getLogger("adapterbank.load")
_LAYING_OUT = threading.Lock()
_TOKENS_AT_ONCE = 8192
"""Tokens in one batch of `encode`: enough to use the machine fully, few enough for any memory."""


@dataclass(frozen=True)
class Backbone:
    """A frozen encoder and its tokenizer. Its tensors are never modified."""

    name: str
    folder: Path
    config: EncoderConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    """Every tensor of the encoder, float32, by our names."""
    tokenizer: Tokenizer = field(repr=False)
    sha256: str
    """Its identity (see `identity`): equal for all copies that compute the same."""
    _laid_out: dict[str, FrozenTensors] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def has_pooler(self) -> bool:
        """Whether the checkpoint has a pooler: a tanh layer on the first token."""
        return "pooler.weight" in self.tensors

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def tokenize(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, max_length: int | None = None
    ) -> list[Tokens]:
        """Turn texts, or pairs of texts, into token ids, cut to `max_length` (by default the encoder's limit)."""
        limit = self.config.max_length
        if max_length is not None and max_length > limit:
            raise InputError(f"max_length {max_length} is more than {self.name} has positions for, {limit}. Lower it.")
        return tokenize(self.tokenizer, texts, pairs, limit if max_length is None else max_length)

    def laid_out(self, layout: str = "fp32") -> FrozenTensors:
        """Return its tensors with the matrices as products on a CPU read them, laid out once for each layout."""
        with _LAYING_OUT:
            if layout not in self._laid_out:
                self._laid_out[layout] = FrozenTensors(join_projections(self.tensors), layout)
            return self._laid_out[layout]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is laid out: another process lays it out again."""
        return {**self.__dict__, "_laid_out": {}}

    def keep_only(self, layout: str) -> None:
        """Free the matrices of all other layouts."""
        for other in [other for other in self._laid_out if other != layout]:
            del self._laid_out[other]

    @property
    def reference(self) -> dict[str, str]:
        """Its name and checksum, as banks and packages keep them."""
        return {"name": self.name, "sha256": self.sha256}

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, max_length: int | None = None
    ) -> list[np.ndarray]:
        """Return the last hidden states of each text as one `(tokens, hidden)` array, in order."""
        if isinstance(texts, str):
            texts, pairs = [texts], [pairs] if isinstance(pairs, str) else pairs
        rows = self.tokenize(texts, pairs, max_length)
        found: dict[int, np.ndarray] = {}
        for chosen in by_length(rows, _TOKENS_AT_ONCE):
            batch = pack([rows[i] for i in chosen])
            with torch.inference_mode():
                hidden = forward(self.config, Frozen(self.laid_out()), batch)
            found |= {i: part.numpy() for i, part in zip(chosen, hidden.split(list(batch.lengths)), strict=True)}
        return [found[i] for i in range(len(rows))]


def load(name: str, tensors: Mapping[str, Tensor] | None = None) -> Backbone:
    """Load a backbone from a folder, a short name or a name on the hub.

    `tensors` are its tensors where they are in memory already.
    """
    folder = locate(name)
    LOG.debug("the encoder %s is in %s", name, folder)
    config = read_config(_read_fields(folder), str(folder))
    if tensors is None:
        tensors = _named(config, _read_tensors(folder), folder)
    tokenizer, description = read_tokenizer(folder, word_piece=FAMILIES[config.family].word_piece)
    if (highest := max(tokenizer.get_vocab().values(), default=0)) >= config.vocabulary:
        raise BackboneError(
            f"{folder}: the tokenizer's highest token id is {highest}, but the encoder has {config.vocabulary} "
            "embeddings. They do not belong together."
        )
    found = Backbone(name, folder, config, tensors, tokenizer, identity(config, tensors, description))
    LOG.debug("loaded it: %s parameters, sha256 %s", f"{found.parameters:,}", found.sha256[:12])
    return found


def locate_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer of a backbone without reading its weights."""
    folder = locate(name)
    config = read_config(_read_fields(folder), str(folder))
    return read_tokenizer(folder, word_piece=FAMILIES[config.family].word_piece)[0]


def identity(config: EncoderConfig, tensors: Mapping[str, Tensor], tokenizer: Any) -> str:
    """Return one sha256 over what determines the outputs: float32 tensors by our names, tokenizer, mathematics.

    Single-file, sharded and `.bin` copies agree; an fp16 copy, whose numbers are rounded, does not.
    """
    digest = hashlib.sha256(canonical_json([config.mathematics(), tokenizer], parsed=True).encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} {list(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()


def _read_fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BackboneError(
            f"{folder} has no config.json, so it is not a backbone. It needs config.json, weights and a tokenizer."
        ) from None
    except (ValueError, OSError) as error:
        raise BackboneError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BackboneError(f"{path} does not contain a JSON object.")
    return fields


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint: safetensors first, else `.bin` without executing code from it."""
    files = weight_files(folder)
    if not files:
        raise BackboneError(f"{folder} has no weights: model.safetensors or pytorch_model.bin, whole or in shards.")
    if missing := [file.name for file in files if not file.is_file()]:
        raise BackboneError(f"{folder} is not whole: {', '.join(missing)} is missing. Fetch it again.")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= _read_pickled(file) if file.suffix == ".bin" else _read_safetensors(file)
    return found


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            # Cloned: tensors of a mapped file have any alignment, and the last bit of a product depends on that.
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BackboneError(f"{path} cannot be read ({error}). Fetch it again.") from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        return {str(key): value for key, value in found.items() if isinstance(value, Tensor)}
    except Exception as error:  # torch raises many types; all mean that the file is not plain weights
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BackboneError(f"{path} is not a file of plain weights ({reason}). Convert it to safetensors.") from error


def _named(config: EncoderConfig, found: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by our names, as float32, once all are known to exist with the right shapes."""
    family = FAMILIES[config.family]
    plain = {_modern(key.removeprefix(family.prefix)): value for key, value in found.items()}
    pooler = family.embeddings.get("pooler")
    has_pooler = pooler is not None and f"{pooler}.weight" in plain
    names = checkpoint_names(config, has_pooler)
    if missing := [theirs for theirs in names.values() if theirs not in plain]:
        raise BackboneError(
            f"{folder}: the weights lack {len(missing)} of {len(names)} tensors, first {missing[0]!r}. "
            f"Is it a {config.family} encoder?"
        )
    shapes, parts, taken = config.shapes(has_pooler), Counter(names.values()), Counter[str]()
    tensors = {}
    for ours, theirs in names.items():
        rows, *columns = shapes[ours]
        expected = (rows * parts[theirs], *columns)
        if tuple(plain[theirs].shape) != expected:
            raise BackboneError(
                f"{folder}: {theirs} has shape {tuple(plain[theirs].shape)}, but config.json implies {expected}."
            )
        if not plain[theirs].is_floating_point():
            raise BackboneError(f"{folder}: {theirs} is {plain[theirs].dtype}; quantised weights are not supported.")
        part = plain[theirs].split(rows)[taken[theirs]]
        taken[theirs] += 1
        tensors[ours] = part.to(torch.float32).contiguous()
    joined = join_projections(tensors)  # in one memory from the start, so that no other copy is ever made
    return {name: joined[name] for name in tensors}


def _modern(name: str) -> str:
    """Rename a LayerNorm's gain and bias, which checkpoints converted from TensorFlow call gamma and beta."""
    return name.replace(".gamma", ".weight").replace(".beta", ".bias")
