"""Small random encoders of every family, saved by `transformers` as a user would find them on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = "the a cat dog sat ran on in mat house big small red fox jumps over lazy why who what is was good bad film"
PIECES = ["##s", "##ed", "##ing", *[f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"], *"abcdefghijklmnopqrstuvwxyz.,?!'"]
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 128,
}
DISTIL = {"n_layers": 3, "dim": 32, "n_heads": 4, "hidden_dim": 48, "vocab_size": 128}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SMALL, "max_position_embeddings": 64}),
    "roberta": ("Roberta", {**SMALL, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**SMALL, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}),
    "camembert": ("Camembert", {**SMALL, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}),
    "distilbert": ("DistilBert", {**DISTIL, "max_position_embeddings": 64}),
    "electra": ("Electra", {**SMALL, "embedding_size": 16, "max_position_embeddings": 64}),
    "mpnet": ("MPNet", {**SMALL, "max_position_embeddings": 66, "pad_token_id": 1}),
    "albert": ("Albert", {**SMALL, "embedding_size": 16, "max_position_embeddings": 64, "num_hidden_groups": 1}),
}

TEXTS = [
    "the cat sat",
    "a big red fox jumps over the lazy dog",
    "why",
    "who ran in the house? the small dog was bad.",
    "is it a good film",
    "what",
    "the the the a a a on in mat house",
]
"""Rows of different lengths, some of a single word."""


def vocabulary(pad: int = 0) -> list[str]:
    """Return the tokens in the order of their ids: the lines of vocab.txt."""
    first = ["[UNK]", "[PAD]"] if pad == 1 else ["[PAD]", "[UNK]"]
    return list(dict.fromkeys([*first, "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *PIECES]))


def tokenizer(pad: int, *, fixed: bool = False) -> Tokenizer:
    """Return a small WordPiece tokenizer; `fixed` adds truncation and padding, as MiniLM's file does."""
    ids = {word: i for i, word in enumerate(vocabulary(pad))}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(vocabulary(pad)[:5])
    if fixed:
        made.enable_truncation(4)
        made.enable_padding(length=8)
    return made


def save_random(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Save a small random model and its tokenizer into a folder; return the `transformers` model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    name, options = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**options, **changes})
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # LayerNorms start at one and zero: make every value matter
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer(config.pad_token_id or 0, fixed=True).save(str(folder / "tokenizer.json"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    return model
