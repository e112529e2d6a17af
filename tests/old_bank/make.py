"""Write the fixture bank of this folder: an encoder, data, a bank with everything a bank can hold, and its checksums.

The bank was written once, by release 0.1.0, and stands for the banks that users of that release have. It must not be
written anew when a test fails: `tests/test_old_bank.py` checks that later code still reads it and still trains the same
weights. Only a deliberate change of a format, announced in the changelog, is a reason to run

    OMP_NUM_THREADS=1 python make.py

in a copy of this folder outside the source tree, since the record of the run that was trained over HTTP names the
bank's absolute path. Everything else is named relative to this folder. Only public interfaces are used: the package's
top level, and the command `adapterbank`.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn import functional

import adapterbank

HERE = Path(__file__).resolve().parent
COMMAND = str(Path(sys.executable).with_name("adapterbank"))
FAST: dict[str, Any] = {"epochs": 3, "batch": 8, "lr": 0.03, "max_length": 32, "seed": 1}
SMALL = {**FAST, "size": 4}

REVIEWS = {"train": "data/reviews.csv", "dev": "data/reviews-dev.csv"}
PACKAGES: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("adapter", {**REVIEWS, "test": "data/reviews-dev.csv"}, SMALL),
    # The other methods.
    ("full", REVIEWS, {**FAST, "method": "full", "lr": 3e-3}),
    ("top", REVIEWS, {**FAST, "method": "top", "lr": 3e-3, "pooling": "pooler"}),
    ("layernorm", REVIEWS, {**FAST, "method": "layernorm"}),
    ("lora", REVIEWS, {**FAST, "method": "lora", "rank": 3, "alpha": 6, "targets": "query,value,up"}),
    ("bitfit", REVIEWS, {**FAST, "method": "bitfit"}),
    ("feature", REVIEWS, {**FAST, "method": "feature", "head_hidden": 8}),
    # The variants of adapters.
    ("parallel", REVIEWS, {**SMALL, "placement": "parallel"}),
    ("multiply", REVIEWS, {**SMALL, "combine": "multiply"}),
    ("inner-norm", REVIEWS, {**SMALL, "inner_norm": True}),
    ("deep", REVIEWS, {**SMALL, "depth": 2, "size": 3}),
    ("attention", REVIEWS, {**SMALL, "sites": "attention", "activation": "relu"}),
    ("upper", REVIEWS, {**SMALL, "layers": "1", "pooling": "first"}),
    ("frozen-norms", REVIEWS, {**SMALL, "train_norms": False, "class_weights": "balanced", "dropout": 0.3}),
    # The other kinds of tasks; the first is without dev data, so that a part of the training data is held out.
    ("pair", {"train": "data/pairs.csv"}, SMALL),
    ("multilabel", {"train": "data/tags.jsonl", "dev": "data/tags.jsonl"}, SMALL),
    ("regression", {"train": "data/ratings.tsv", "dev": "data/ratings.tsv"}, SMALL),
    (
        "span",
        {"train": "data/questions.jsonl", "dev": "data/questions.jsonl"},
        {**SMALL, "epochs": 5, "doc_stride": 10},
    ),
    # A task with two versions.
    ("twice", REVIEWS, SMALL),
    ("twice", REVIEWS, {**SMALL, "seed": 2}),
    # What the unfinished run must end as.
    ("unbroken", REVIEWS, {**SMALL, "seed": 3}),
]
SERVED = {**SMALL, "seed": 4}
"""Options of the run that is trained over HTTP."""

STUDY = """\
# Six runs and what is selected among them. Three of the six have records in the bank.
task: study
train: data/reviews.csv
dev: data/reviews-dev.csv
backbone: encoder
device: cpu
epochs: 2
batch: 8
max_length: 32
blocks:
  - name: adapters
    size: [2, 4]
    lr: [1e-2, 3e-2]
    select: {seeds: 2}
  - name: norms
    method: layernorm
    lr: [1e-2, 3e-2]
"""
RECORDED = 3

GOOD, BAD = ("good", "great", "lovely", "fine"), ("bad", "dull", "poor", "awful")
NOUNS = ("film", "book", "song", "meal", "play", "game", "walk", "soup")
PLACES = ("garden", "house", "park", "street", "town", "hall", "kitchen", "school")
WORDS = (
    *(*GOOD, *BAD, *NOUNS, *PLACES, "the", "was", "and", "in", "where", "it", "liked", "nobody", "everybody"),
    *("a", "is", "not", "who", "very", "there", "but", "we", "had", "to", "of", "that", "this"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(*WORDS, *LETTERS, *".,?!'%-0123456789", *(f"##{letter}" for letter in LETTERS)),
)
HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 16, 2, 2, 32, 64


def stamp() -> dict[str, Any]:
    """Say what the last bits of a training depend on."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "arithmetic": arithmetic(),
    }


def arithmetic() -> str:
    """Give a checksum of sums, products and functions as torch computes them here, in the sizes of this encoder.

    The libraries below torch choose their code by the processor and by environment variables, so torch's version and
    CPU capability alone do not decide the last bit.
    """
    draw, found = np.random.RandomState(3), hashlib.sha256()

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape).astype(np.float32)).clone()

    def add(*results: torch.Tensor) -> None:
        for result in results:
            found.update(result.contiguous().numpy().tobytes())

    shapes = ((HIDDEN, HIDDEN), (HIDDEN, 3 * HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, 4), (4, HIDDEN))
    for rows in range(1, 257):
        for inputs, outputs in (*shapes, (HIDDEN, 2)):
            x, weight = numbers(rows, inputs), numbers(outputs, inputs)
            y = functional.linear(x, weight, numbers(outputs))
            add(y, y.T @ x, y @ weight, x.sum(0))
    for length in range(2, 33):
        x = numbers(8, HEADS, length, HIDDEN // HEADS)
        weights = torch.softmax(x @ x.transpose(2, 3), 3)
        add(weights, weights @ x, functional.layer_norm(x, x.shape[3:]), x.logsumexp(2))
    x = numbers(1000)
    add(torch.tanh(x), torch.exp(x), functional.gelu(x), functional.gelu(x, approximate="tanh"), x.square().sum())
    return found.hexdigest()


# --- encoder and data -----------------------------------------------------------------------------------------------


def make_encoder(folder: Path) -> None:
    """Save a small random BERT as it would be found on the hub."""
    folder.mkdir()
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "hidden_act": "gelu",
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    draw = np.random.RandomState(0)  # whose stream is frozen for good

    def normal(*shape: int, around: float = 0.0, width: float = 0.3) -> np.ndarray:
        return (around + width * draw.standard_normal(shape)).astype(np.float32)

    def linear(name: str, outputs: int, inputs: int) -> dict[str, np.ndarray]:
        return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": normal(outputs)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": normal(HIDDEN, around=1.0), f"{name}.bias": normal(HIDDEN)}

    tensors = {"embeddings.word_embeddings.weight": normal(len(VOCABULARY), HIDDEN, width=1.0)}
    tensors |= {"embeddings.position_embeddings.weight": normal(POSITIONS, HIDDEN, width=0.1)}
    tensors |= {"embeddings.token_type_embeddings.weight": normal(2, HIDDEN, width=0.1)}
    tensors |= norm("embeddings.LayerNorm")
    for layer in range(LAYERS):
        place = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            tensors |= linear(f"{place}.attention.{part}", HIDDEN, HIDDEN)
        tensors |= norm(f"{place}.attention.output.LayerNorm")
        tensors |= linear(f"{place}.intermediate.dense", INNER, HIDDEN)
        tensors |= linear(f"{place}.output.dense", HIDDEN, INNER)
        tensors |= norm(f"{place}.output.LayerNorm")
    tensors |= linear("pooler.dense", HIDDEN, HIDDEN)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    tokenizer.add_special_tokens([*VOCABULARY[:5]])
    tokenizer.save(str(folder / "tokenizer.json"))


def sentences(count: int) -> list[tuple[str, str, bool]]:
    """Give sentences, each with its noun and whether it praises."""
    draw, found = np.random.RandomState(1), []
    for number in range(count):
        noun, good = NOUNS[number % len(NOUNS)], bool((number + number // len(NOUNS)) % 2)
        words = draw.permutation(GOOD if good else BAD)[:2].tolist()
        found.append((f"the {noun} was {words[0]} and {words[1]}", noun, good))
    return found


def make_data(folder: Path) -> None:
    """Write labelled data for every kind of task, in several formats."""
    folder.mkdir()
    rows = sentences(96)
    reviews = [(text, "positive" if good else "negative") for text, _, good in rows]
    table(folder / "reviews.csv", ("text", "label"), reviews[:64])
    table(folder / "reviews-dev.csv", ("text", "label"), reviews[64:])
    liked = [(NOUNS[place // 2 % len(NOUNS)], bool(place % 2)) for place in range(len(rows))]
    pairs = [
        (text, f"{'everybody' if praise else 'nobody'} liked the {noun}", "yes" if good else "no")
        for (text, _, good), (noun, praise) in zip(rows, liked, strict=True)
    ]
    table(folder / "pairs.csv", ("sentence1", "sentence2", "label"), pairs)
    tags = [
        {"text": text, "labels": [*(["food"] if noun in ("meal", "soup") else []), *(["praise"] if good else [])]}
        for text, noun, good in rows
    ]
    lines(folder / "tags.jsonl", tags)
    ratings = [(text, 2.25 + 1.5 * good + NOUNS.index(noun) / 8) for text, noun, good in rows]
    table(folder / "ratings.tsv", ("text", "score"), ratings)
    lines(folder / "questions.jsonl", questions())


def questions() -> list[dict[str, Any]]:
    """Give questions on contexts longer than `max_length`; every third has no answer."""
    draw, found = np.random.RandomState(2), []
    for number in range(48):
        told = [f"{text} ." for text, *_ in (sentences(96)[place] for place in draw.permutation(96)[:4])]
        place = PLACES[number % len(PLACES)]
        answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
        if number % 3 < 2:
            told.insert(int(draw.randint(5)), f"it was in the {place} .")
            answers = {"text": [place], "answer_start": [" ".join(told).index(f" {place} ") + 1]}
        found.append({"question": "where was it ?", "context": " ".join(told), "answers": answers})
    return found


def mixed(refs: Iterable[str]) -> list[dict[str, Any]]:
    """Give three rows for each task, which name it and have its texts under its own columns."""
    texts = [{"text": text} for text, *_ in sentences(3)]
    pairs = [{"sentence1": text, "sentence2": f"everybody liked the {noun}"} for text, noun, _ in sentences(3)]
    spans = [{name: row[name] for name in ("question", "context")} for row in questions()[3:6]]
    kinds = {"pair": pairs, "span": spans}
    return [{"task": ref, **row} for ref in refs for row in kinds.get(ref.partition("@")[0], texts)]


def table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV or TSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t", lineterminator="\n")
        writer.writerows([columns, *rows])


def lines(path: Path, rows: Iterable[Any]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# --- the bank -------------------------------------------------------------------------------------------------------


def train(bank: adapterbank.OpenBank, task: str, files: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """Train a task and give what must be known to train it again."""
    record = bank.train(task, **files, **options).record
    return {record["package"]: {"task": task, "files": files, "options": options}}


def interrupt(bank: adapterbank.OpenBank, task: str, files: dict[str, str], options: dict[str, Any]) -> None:
    """Begin a run and break it off in its second epoch."""

    def watch(progress: Any) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    try:
        bank.train(task, **files, **options, watch=watch)
    except KeyboardInterrupt:
        return
    raise AssertionError("The run was not broken off.")


def serve_and_train(key: str) -> dict[str, Any]:
    """Train a task over HTTP, as the holder of the key."""
    words = [COMMAND, "serve", "--bank", "bank", "--port", "0", "--device", "cpu", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            told = json.loads("".join(itertools.islice(server.stdout, 4)))
            with adapterbank.Client(told["address"], key) as client:
                run = client.wait(client.train("served", REVIEWS["train"], **SERVED))
        finally:
            server.terminate()
    return {f"served@{run.version}": {"task": "served", "files": {"train": REVIEWS["train"]}, "options": SERVED}}


def command(*words: str) -> str:
    """Run `adapterbank` and give its standard output."""
    return subprocess.run([COMMAND, *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def sha256(bank: Path, ref: str) -> str:
    """Give the checksum of a package's weights."""
    name, version = ref.split("@")
    return hashlib.sha256((bank / "tasks" / name / version / "weights.safetensors").read_bytes()).hexdigest()


def main() -> None:
    """Write everything anew."""
    torch.set_num_threads(1)
    os.chdir(HERE)
    for name in ("encoder", "data", "bank"):
        shutil.rmtree(name, ignore_errors=True)
    make_encoder(Path("encoder"))
    make_data(Path("data"))
    Path("study.yaml").write_text(STUDY, encoding="utf-8")
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"ADAPTERBANK_CACHE": cache, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        make_bank(Path("bank"))
    for path in [*Path("bank").rglob(".*")]:
        path.unlink()  # locks


def make_bank(path: Path) -> None:
    """Train, prune, ablate, sweep and serve; then write down the checksums and what the tasks say."""
    bank = adapterbank.open_bank(path, "encoder", device="cpu")
    packages: dict[str, Any] = {}
    for task, files, options in PACKAGES:
        packages |= train(bank, task, files, options)
    pruned = train(bank, "pruned", REVIEWS, {**SMALL, "prune": True, "tolerance": 100.0})  # two versions
    packages |= {"pruned@1": {"task": "pruned", "files": REVIEWS, "options": SMALL}, **pruned}
    bank.ablate("adapter", REVIEWS["dev"])
    bank.train("words", **REVIEWS, method="automl", trials=2)  # leaves a record and no package
    interrupt(bank, "unfinished", REVIEWS, PACKAGES[-1][2])
    command("sweep", "study.yaml", "--bank", str(path), "--limit-runs", str(RECORDED))
    scopes = ("--scope", "predict", "--scope", "train")
    key = json.loads(command("keys", "add", "--bank", str(path), "--name", "fixture", *scopes, "--json"))["key"]
    packages |= serve_and_train(key)
    for ref, about in packages.items():
        about["sha256"] = sha256(path, ref)
    unfinished = {"task": "unfinished", "files": REVIEWS, "options": PACKAGES[-1][2], "ends_as": "unbroken@1"}
    found = {
        "library": adapterbank.__version__,
        "stamp": stamp(),
        "packages": packages,
        "unfinished": {**unfinished, "sha256": packages["unbroken@1"]["sha256"]},
        "key": key,
    }
    Path("checksums.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    lines(Path("data/mixed.jsonl"), mixed(packages))
    words = ("predict", "--bank", str(path), "--device", "cpu", "--task-column", "task", "data/mixed.jsonl")
    Path("predictions.jsonl").write_text(command(*words), encoding="utf-8")


if __name__ == "__main__":
    main()
