"""Promise: a family unlike BERT is one row and the arithmetic that is new; it trains, predicts and serves like any.

The dummy has pre-norm blocks without a LayerNorm in the first, a gated feed-forward, no biases, joined projections in
its checkpoint, a final LayerNorm, rotary positions (Su et al. 2021), and attention within a span in its middle layer.
`Reference` computes the same in plain torch, one text at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import adapterbank
from adapterbank import methods
from adapterbank.encoder import families as table
from adapterbank.encoder import positions as schemes
from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.batch import PackedBatch, PaddedBatch, pack
from adapterbank.encoder.config_json import read_config
from adapterbank.encoder.families import EncoderConfig, Family
from adapterbank.encoder.forward import Frozen, forward, fused_attention, join_projections
from adapterbank.encoder.positions import PositionScheme
from adapterbank.encoder.protocol import Slots
from adapterbank.inference.graph_runner import GraphRunner
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.inference.runner import outputs
from adapterbank.methods import Options
from adapterbank.slots.plan import Head, make_plan
from adapterbank.slots.stack import Stacks
from families import TEXTS, tokenizer
from jobs import CPU, assert_close, assert_same_bits, job_on, three_runs, train_jobs
from plain_kernels import PLAIN
from small_data import reviews

SOURCE = Path(adapterbank.__file__).parent
WIDTH, HEADS, INNER, LAYERS, SPAN, EPSILON = 32, 4, 24, 3, 2, 1e-5
THETAS = (10_000.0, 100.0, 10_000.0)
FIELDS: dict[str, Any] = {
    **{"model_type": "dummy", "vocab_size": 128, "width": WIDTH, "depth": LAYERS, "heads": HEADS, "inner": INNER},
    **{"activation": "gelu", "norm_eps": EPSILON, "max_position_embeddings": 64, "thetas": THETAS, "span": SPAN},
    **{"linear_bias": False, "norm_bias": False},
}


# --- the row, and the arithmetic that no other family has


def rotation(config: EncoderConfig, _: Slots, batch: PackedBatch | PaddedBatch, layer: int) -> tuple[Tensor, ...]:
    """Return the cosines and sines `[L, width of a head]` of one layer."""
    width = config.hidden // config.heads
    rates = config.position_constants["thetas"][layer] ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(batch.longest)[:, None] * rates
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(q: Tensor, k: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, None]:
    """Turn query and key by the angles of their positions."""
    cosines, sines = tensors

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cosines + torch.cat([-b, a], -1) * sines

    return turned(q), turned(k), None


ROTARY = PositionScheme(
    tensors=rotation, scores=rotate, constants=lambda fields: {"thetas": list(map(float, fields["thetas"]))}
)
ROW = Family(
    prefix="dummy.",
    embeddings={"embeddings.word": "tokens", "embeddings.norm": "norm", "final.norm": "final_norm"},
    layer="blocks.{i}.",
    parts={
        **{f"attention.{part}": "qkv" for part in ("query", "key", "value")},
        **{"attention.output": "out", "attention.norm": "attention_norm"},
        **{"feedforward.up": "up", "feedforward.down": "down", "feedforward.norm": "feedforward_norm"},
    },
    fields={
        **{"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads"},
        **{"intermediate_size": "inner", "hidden_act": "activation", "layer_norm_eps": "norm_eps"},
    },
    block="pre_norm",
    feedforward="gated",
    positions="rotary",
    attention_spans=lambda fields, layers: tuple(fields["span"] * (i % 2) for i in range(layers)),
    biases={"attention": "linear_bias", "feedforward": "linear_bias", "norm": "norm_bias"},
    absent=frozenset({"layers.0.attention.norm"}),
    token_types=False,
    final_norm=True,
)


class ReferenceBlock(nn.Module):
    """One layer, in plain torch."""

    def __init__(self, number: int, bias: bool) -> None:
        super().__init__()
        self.number = number
        self.attention_norm = nn.LayerNorm(WIDTH, EPSILON, bias=bias) if number else nn.Identity()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.feedforward_norm = nn.LayerNorm(WIDTH, EPSILON, bias=bias)
        self.up = nn.Linear(WIDTH, 2 * INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def turned(self, x: Tensor) -> Tensor:
        """Rotate pairs of numbers, as complex numbers, `[heads, L, width]`."""
        half = x.shape[-1] // 2
        rates = THETAS[self.number] ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * rates
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(len(x), HEADS, -1).transpose(0, 1) for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        scores = self.turned(q) @ self.turned(k).transpose(1, 2) / (WIDTH // HEADS) ** 0.5
        if self.number % 2:
            places = torch.arange(len(x))
            scores = scores.masked_fill((places[:, None] - places).abs() > SPAN, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        a, gate = self.up(self.feedforward_norm(x)).chunk(2, -1)
        return x + self.down(F.gelu(a) * gate)


class Reference(nn.Module):
    """The whole encoder, in plain torch."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(FIELDS["vocab_size"], WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPSILON, bias=bias)
        self.blocks = nn.ModuleList(ReferenceBlock(i, bias) for i in range(LAYERS))
        self.final_norm = nn.LayerNorm(WIDTH, EPSILON, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


def save(folder: Path, **changes: Any) -> Reference:
    """Save a small random dummy with its tokenizer; return the reference."""
    torch.manual_seed(0)
    fields = {**FIELDS, **changes}
    model = Reference(bias=fields["linear_bias"]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_file({f"dummy.{name}": t.clone() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    tokenizer(0).save(str(folder / "tokenizer.json"))
    return model


@pytest.fixture(autouse=True)
def _dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the row, and the position scheme that it names."""
    monkeypatch.setitem(table.FAMILIES, "dummy", ROW)  # type: ignore[arg-type]
    monkeypatch.setitem(schemes.POSITIONS, "rotary", ROTARY)  # type: ignore[arg-type]


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    """Return the reference, whose checkpoint is in `tmp_path / "dummy"`."""
    (tmp_path / "dummy").mkdir()
    return save(tmp_path / "dummy")


@pytest.fixture
def dummy(reference: Reference, tmp_path: Path) -> Backbone:
    """Return the dummy's backbone."""
    return load(str(tmp_path / "dummy"))


# --- names and identity


def modules(layer: int) -> set[str]:
    """Name the tensors of one layer."""
    names = {f"attention.{part}" for part in ("query", "key", "value", "output", "norm")}
    names |= {f"feedforward.{part}" for part in ("up", "down", "norm")}
    names |= {"final.norm"} if layer == LAYERS - 1 else set()
    return {f"layers.{layer}.{name}.weight" for name in names} - {"layers.0.attention.norm.weight"}


EMBEDDINGS = {"embeddings.word.weight", "embeddings.norm.weight"}
EVERYTHING = EMBEDDINGS.union(*(modules(i) for i in range(LAYERS)))
NORMS = {name for name in EVERYTHING if name.endswith("norm.weight")}
HEAD = {"head.weight", "head.bias"}


def test_the_encoder_has_exactly_the_tensors_that_its_row_states(dummy: Backbone, reference: Reference) -> None:
    assert set(dummy.tensors) == EVERYTHING
    assert dummy.parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert dummy.tensors["layers.1.feedforward.up.weight"].shape == (2 * INNER, WIDTH)
    query, key, value = (dummy.tensors[f"layers.1.attention.{part}.weight"] for part in ("query", "key", "value"))
    assert torch.equal(torch.cat([query, key, value]), reference.blocks[1].qkv.weight)
    assert not dummy.has_pooler


def test_all_that_changes_the_outputs_changes_the_identity(dummy: Backbone) -> None:
    known = dummy.config.mathematics()
    assert {"block": "pre_norm", "feedforward": "gated", "attention_spans": [0, SPAN, 0]}.items() <= known.items()
    for changes in ({"span": SPAN + 1}, {"thetas": [1.0, 2.0, 3.0]}, {"norm_eps": 1e-6}):
        assert read_config({**FIELDS, **changes}, "some/folder").mathematics() != known


def test_the_mathematics_of_the_first_families_are_stated_as_before(tiny: Callable[[str], Backbone]) -> None:
    for family in set(table.FAMILIES) - {"dummy"}:
        known = tiny(family).config.mathematics()
        assert list(known) == ["heads", "groups", "activation", "epsilon", "first_position", "relative"]


# --- hidden states and gradients


@pytest.mark.parametrize("bias", [False, True])
def test_hidden_states_and_gradients_are_those_of_the_reference(bias: bool, tmp_path: Path) -> None:
    model = save(tmp_path, linear_bias=bias, norm_bias=bias)
    backbone = load(str(tmp_path))
    rows = backbone.tokenize([*TEXTS, "the cat " * 40])
    batch = pack(rows)
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in backbone.tensors.items()}
    found = forward(backbone.config, Frozen(tensors), batch)
    expected = torch.cat([model(torch.from_numpy(row.ids)) for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for states in (found, expected):
        states.square().mean().backward()
    theirs = dict(model.named_parameters())
    for name, their_name in table.checkpoint_names(backbone.config, False).items():
        gradient = theirs[their_name].grad
        assert gradient is not None
        if their_name.endswith(("qkv.weight", "qkv.bias")):
            part = ("query", "key", "value").index(name.split(".")[-2])
            gradient = gradient.chunk(3)[part]
        torch.testing.assert_close(tensors[name].grad, gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n} {m}")


def test_a_start_in_the_middle_and_joined_projections_change_nothing(dummy: Backbone) -> None:
    batch = pack(dummy.tokenize(TEXTS))
    whole = forward(dummy.config, Frozen(dummy.tensors), batch)
    for first in range(LAYERS + 1):
        assert torch.equal(forward(dummy.config, Frozen(dummy.tensors), batch, first=first), whole)
    joined = forward(dummy.config, Frozen(join_projections(dummy.tensors)), batch)
    torch.testing.assert_close(joined, whole, atol=1e-6, rtol=1e-6)


def test_padding_that_sees_no_token_within_its_span_gives_no_nan(dummy: Backbone) -> None:
    batch = pack(dummy.tokenize(["why", "the cat " * 20]))
    tensors = {name: tensor.clone().requires_grad_() for name, tensor in dummy.tensors.items()}
    forward(dummy.config, Frozen(tensors), batch).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in tensors.values())


def test_the_kernel_that_takes_a_mask_alone_is_not_used(dummy: Backbone) -> None:
    assert fused_attention(dummy.config, torch.device("cuda")) is None


# --- what trains and what is saved


def adapters(*layers: int) -> set[str]:
    return {
        f"layers.{i}.{site}.adapter.{part}.{leaf}"
        for i in layers
        for site in ("attention", "feedforward")
        for part in ("down", "up")
        for leaf in ("weight", "bias")
    }


def low_rank(*modules: str) -> set[str]:
    return {f"layers.{i}.{module}.lora.{leaf}" for i in range(LAYERS) for module in modules for leaf in "ab"}


SAVED: Mapping[str, tuple[dict[str, Any], set[str]]] = {
    "adapter": ({"size": 4}, adapters(0, 1, 2) | NORMS),
    "adapter above": ({"size": 4, "layers": "2"}, adapters(2) | (NORMS & modules(2))),
    "full": ({"method": "full"}, EVERYTHING),
    "top": ({"method": "top", "top": 1}, modules(2)),
    "layernorm": ({"method": "layernorm"}, NORMS),
    "lora": (
        {"method": "lora", "targets": "query,up,down"},
        low_rank("attention.query", "feedforward.up", "feedforward.down"),
    ),
    "ia3": (
        {"method": "ia3"},
        {
            f"layers.{i}.{site}.ia3.scale"
            for i in range(LAYERS)
            for site in ("attention.key", "attention.value", "feedforward.inner")
        },
    ),
    "bitfit": ({"method": "bitfit"}, set()),  # there are no biases but the head's
    "feature": ({"method": "feature"}, set()),
}


def test_every_method_is_taken_through_the_drill() -> None:
    drilled = {options.get("method", "adapter") for options, _ in SAVED.values()}
    needs_no_task = {name for name, method in methods.METHODS.items() if method.slot and "fuse" not in method.uses}
    assert drilled == needs_no_task


@pytest.mark.parametrize("method", SAVED)
def test_a_method_trains_and_saves_exactly_these_tensors(method: str, dummy: Backbone, tmp_path: Path) -> None:
    options, expected = SAVED[method]
    bank = adapterbank.open_bank(tmp_path / "bank", dummy, device="cpu")
    package = bank.train("sentiment", reviews(), epochs=2, batch=8, max_length=32, **options).package
    saved = package.tensors()
    assert set(saved) == expected | HEAD
    assert not [name for name in expected & EVERYTHING if np.array_equal(saved[name], dummy.tensors[name])]
    assert [(finding.ok, finding.how) for finding in bank.audit()] == [(True, "to the bit")]


# --- both look-ups


def test_steps_of_fixed_shape_train_like_eager_ones(dummy: Backbone, new_slot: Any, graph_training: Any) -> None:
    whole = Options(method="full"), Options(method="lora", targets="up,value"), Options(method="layernorm")
    jobs = [three_runs(dummy, new_slot), *([job_on(dummy, new_slot, options)] for options in whole)]
    for mine in jobs:
        for found, expected in zip(graph_training(dummy, *mine), train_jobs(dummy, *mine), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("method", ["adapter", "full"])
def test_outputs_computed_again_train_to_the_same_bits(
    method: str, dummy: Backbone, new_slot: Any, graph_training: Any
) -> None:
    job = job_on(dummy, new_slot, Options(method=method, size=4))
    for training in (train_jobs, graph_training):
        (always,), (never,) = (training(dummy, job, recompute=when) for when in ("always", "never"))
        assert_same_bits(always, never)


def test_batches_of_fixed_shape_give_what_routed_ones_give(dummy: Backbone, new_slot: Any) -> None:
    stacks = Stacks(join_projections(dummy.tensors))
    runner = GraphRunner(dummy.config, stacks, GraphCompiler(CPU), PLAIN)
    slots: list[int | None] = [None]
    for seed, (options, _) in enumerate(SAVED.values()):
        plan = make_plan(Options(**options), depth=LAYERS, head=Head("classification", 2))
        slots += [stacks.put(plan, new_slot(dummy, plan, seed=seed + 100 * k)) for k in range(2)]
    tokens = [row for _ in slots for row in dummy.tokenize(TEXTS[:3])]
    chosen = [slots[i % len(slots)] for i in range(len(tokens))]
    with torch.inference_mode():
        found = outputs(dummy.config, stacks, tokens, chosen, graph_runner=runner)
        alone = [outputs(dummy.config, stacks, [row], [slot])[0] for row, slot in zip(tokens, chosen, strict=True)]
    for mine, routed, expected in zip(found, outputs(dummy.config, stacks, tokens, chosen), alone, strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-5)
        np.testing.assert_allclose(routed, expected, atol=2e-5)


# --- train, bank, predict, evaluate, serve


def test_the_dummy_trains_predicts_evaluates_and_serves(dummy: Backbone, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="pip install 'adapterbank[serve]'")
    from adapterbank.inference.engine import Engine
    from adapterbank.serving.http.app import create_app
    from adapterbank.serving.service.service import BankService
    from adapterbank.storage.bank import Bank
    from serving.sample_server import served

    bank = adapterbank.open_bank(tmp_path / "bank", dummy, device="cpu")
    bank.train("sentiment", reviews(), epochs=24, size=8, lr=0.01, batch=8, max_length=32)
    bank.train("plain", reviews(), method="layernorm", epochs=2, max_length=32)
    assert bank.evaluate("sentiment", reviews())["accuracy"] > 0.9
    texts = [text for text, _ in reviews(6)]
    expected = bank.predict("sentiment", texts)
    assert [one.label for one in expected] == [label for _, label in reviews(6)]
    again = load(str(dummy.folder))
    assert again.sha256 == dummy.sha256
    service = BankService(Bank.open(tmp_path / "bank"), Engine(again, device="cpu"))
    with served(create_app(service)) as url, adapterbank.Client(url) as client:
        assert sorted(task.name for task in client.tasks()) == ["plain", "sentiment"]
        found = client.predict("sentiment", texts)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.label == wanted.label
        assert mine.probabilities == pytest.approx(wanted.probabilities, abs=1e-5)


# --- no family is known by name


def test_no_code_outside_the_table_compares_the_name_of_a_family() -> None:
    names = "|".join(re.escape(name) for name in table.FAMILIES)
    quoted = re.compile(rf"""(["'])({names})\1""")
    asks = re.compile(r"\bfamily\s*(==|!=|in\b|not in\b)|(==|!=)\s*(\w+\.)*family\b")
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path != SOURCE / "encoder" / "families.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (quoted.search(line) and not SHORT_NAME.search(line)) or (asks.search(line) and "encoder" in str(path))
    ]
    assert found == []


SHORT_NAME = re.compile(r"""^\s*["'](mpnet|camembert|distilbert)["']: Source\(""")
"""Rows of `sources.SOURCES`: some backbones have the short name of their family."""
