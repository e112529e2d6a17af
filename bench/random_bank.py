"""A bank of random tasks on a real encoder, and texts of an exact length, for the measurements of serving."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from adapterbank.encoder.backbone import Backbone
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, Plan, make_plan
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import FORMAT, Manifest, count_params
from adapterbank.tasks.spec import Task
from adapterbank.training.builder import initial_tensors

WORDS = [
    *("the", "film", "is", "a", "long", "and", "slow", "story", "about", "two", "men", "who", "find", "money", "in"),
    *("an", "old", "house", "near", "sea", "but", "they", "do", "not", "know", "what", "to", "make", "of", "it", "so"),
    *("one", "day", "when", "all", "others", "are", "away", "his", "friend", "comes", "back", "with", "new", "plan"),
    *("for", "work", "which", "no", "man", "could", "like", "very", "much", "good", "bad", "best", "worst", "great"),
    *("poor", "warm", "cold", "dark", "light", "first", "last", "next", "right", "left", "high", "low", "open"),
]
"""Words that are single tokens in the vocabularies of BERT and its relatives."""
SPREAD = 0.05
"""Standard deviation of the tasks' weights: predictions differ by task and by text."""


def name(number: int) -> str:
    """Return a task's name from its number."""
    return f"task{number:04d}"


def texts(backbone: Backbone, count: int, tokens: int, seed: int = 0) -> list[str]:
    """Draw texts of exactly `tokens` tokens, including the special tokens at both ends."""
    draw = random.Random(seed)
    found = [" ".join(draw.choices(WORDS, k=tokens - 2)) for _ in range(count)]
    wrong = {len(row) for row in backbone.tokenize(found)} - {tokens}
    if wrong:
        raise SystemExit(f"texts of {sorted(wrong)} tokens instead of {tokens}: this vocabulary splits some of WORDS")
    return found


def plan(backbone: Backbone, size: int) -> Plan:
    """Return the plan of all tasks: two labels, adapters of one size."""
    return make_plan(Options(size=size), depth=backbone.config.layers, head=Head("classification", 2))


def tensors(backbone: Backbone, size: int, number: int) -> dict[str, np.ndarray]:
    """Draw a task's weights."""
    first = initial_tensors(plan(backbone, size), backbone, sigma=SPREAD, seed=number)
    draw = np.random.default_rng(number)
    noise = {key: draw.standard_normal(t.shape, dtype=np.float32) * np.float32(SPREAD) for key, t in first.items()}
    return {key: first[key].numpy() + noise[key] for key in first}


def make(folder: Path, backbone: Backbone, count: int, size: int, first: int = 0) -> Bank:
    """Create a bank of random tasks, numbered from `first`; existing tasks are kept."""
    about = {"name": backbone.name, "sha256": backbone.sha256}
    bank = Bank.open(folder, about, create=True)
    there = set(bank.names())
    for number in range(first, first + count):
        if name(number) in there:
            continue
        drawn = tensors(backbone, size, number)
        trained = sum(array.size for array in drawn.values())
        task = Task(name(number), "classification", ("text",), "label", ("no", "yes"), "accuracy")
        draft = Manifest(
            format=FORMAT,
            name=name(number),
            version=0,
            task=task.to_json(),
            method=plan(backbone, size).to_json(),
            backbone=about,
            recipe={"max_length": 128},
            seed=number,
            data={},
            metrics={"dev": {"accuracy": 0.5}},
            params=count_params(trained, encoder=backbone.parameters, new=trained),
            bytes=0,
            weights_sha256="",
            library="random",
            created="",
            fingerprint={},
        )
        bank.put(draft, drawn)
    return bank
