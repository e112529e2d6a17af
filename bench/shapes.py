"""Encoders of a given shape with random weights, and rows for them. Imports neither adapterbank nor the peers.

Time does not depend on the values of the weights, so a folder of random weights in the published layout replaces the
real encoder; both sides load the same folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """The dimensions that determine an encoder's cost."""

    layers: int
    hidden: int
    heads: int
    feedforward: int
    vocabulary: int = 30522
    positions: int = 512

    @property
    def inner_parameters(self) -> int:
        """Count the parameters of the layers, without embeddings and pooler."""
        return sum(tensor.numel() for name, tensor in _tensors(self).items() if ".layer." in name)


SHAPES = {
    "base": Shape(12, 768, 12, 3072),
    "minilm": Shape(6, 384, 12, 1536),
    "tiny": Shape(2, 64, 4, 128, vocabulary=2000),
}


def save(shape: Shape, folder: Path) -> str:
    """Write config.json, model.safetensors and vocab.txt, unless they exist; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "vocab.txt").exists():
        return str(folder)
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.feedforward,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": shape.positions,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "model_max_length": 512}))
    torch.manual_seed(0)
    filled = {name: _fill(name, tensor) for name, tensor in _tensors(shape).items()}
    save_file(filled, str(folder / "model.safetensors"), metadata={"format": "pt"})
    special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    words = [special.get(i, f"word{i}") for i in range(shape.vocabulary)]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return str(folder)


def _tensors(shape: Shape) -> dict[str, torch.Tensor]:
    """Return every tensor of a BERT checkpoint by name, without allocating memory."""
    h, f = shape.hidden, shape.feedforward
    sizes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (shape.vocabulary, h),
        "embeddings.position_embeddings.weight": (shape.positions, h),
        "embeddings.token_type_embeddings.weight": (2, h),
    }
    linear = {"pooler.dense": (h, h)}
    norms = ["embeddings.LayerNorm"]
    for i in range(shape.layers):
        at = f"encoder.layer.{i}"
        linear |= {f"{at}.attention.self.{part}": (h, h) for part in ("query", "key", "value")}
        linear |= {f"{at}.attention.output.dense": (h, h)}
        linear |= {f"{at}.intermediate.dense": (f, h), f"{at}.output.dense": (h, f)}
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name, size in linear.items():
        sizes |= {f"{name}.weight": size, f"{name}.bias": size[:1]}
    for name in norms:
        sizes |= {f"{name}.weight": (h,), f"{name}.bias": (h,)}
    return {name: torch.empty(size, device="meta") for name, size in sizes.items()}


def _fill(name: str, like: torch.Tensor) -> torch.Tensor:
    if "LayerNorm.weight" in name:
        return torch.ones(like.shape)
    return torch.zeros(like.shape) if name.endswith("bias") else torch.randn(like.shape) * 0.02


def batches(rows: int, length: int, vocabulary: int, count: int = 4) -> list[dict[str, Any]]:
    """Draw batches of rows of one length: [CLS], ids as frequent as words are (1 / rank), [SEP]."""
    random = np.random.RandomState(rows * 1000 + length)
    first = min(1000, vocabulary // 2)
    rank = np.exp(random.uniform(0, np.log(vocabulary - first), (count, rows, length))).astype(int)
    ids = np.minimum(first + rank - 1, vocabulary - 1)
    ids[:, :, 0], ids[:, :, -1] = 101, 102
    return [{"rows": batch.tolist(), "labels": [int(i % 2) for i in range(rows)]} for batch in ids]
