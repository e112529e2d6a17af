"""Promise: the forward pass computes what `transformers` computes, packed or not, and can start in the middle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.encoder.batch import PackedBatch, Tokens, pack
from adapterbank.encoder.config_json import CHECKPOINT_ACTIVATIONS
from adapterbank.encoder.dropout import Dropout, row_keys
from adapterbank.encoder.forward import Frozen, forward
from families import FAMILIES, save_random

WITH_TYPES = ("bert", "electra", "albert")
WITH_POOLER = ("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "albert")
TEXTS = ["the cat", "", "who was on the big red mat? the lazy fox!", "zzz 世 é", "a dog ran in the house " * 5, "cat"]
SECOND = ["a mat", "the dog is good", "", "why", "bad film " * 9, "cat"]

Checkpoint = Callable[[str], tuple[Path, Any]]
Tiny = Callable[[str], Backbone]


def random_rows(backbone: Backbone, lengths: Sequence[int], *, types: int = 1, seed: int = 0) -> list[Tokens]:
    """Return rows of random tokens without padding ids, each token of a random type."""
    draw = np.random.default_rng(seed)
    return [
        Tokens(draw.integers(2, backbone.config.vocabulary, n), np.sort(draw.integers(0, types, n))) for n in lengths
    ]


def oracle(model: Any, rows: Sequence[Tokens], *, types: bool = False) -> list[Any]:
    """Return the output of `transformers` for one padded and masked batch, and the hidden states of each row."""
    longest = max(len(row) for row in rows)
    inputs = {
        "input_ids": torch.full((len(rows), longest), model.config.pad_token_id),
        "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
    }
    if types:
        inputs["token_type_ids"] = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        inputs["input_ids"][i, : len(row)] = torch.from_numpy(row.ids)
        inputs["attention_mask"][i, : len(row)] = 1
        if types:
            inputs["token_type_ids"][i, : len(row)] = torch.from_numpy(row.types)
    with torch.no_grad():
        output = model(**inputs)
    return [output, *(states[: len(row)].numpy() for states, row in zip(output.last_hidden_state, rows, strict=True))]


def hidden_states(backbone: Backbone, rows: Sequence[Tokens]) -> list[np.ndarray]:
    """Return the last hidden states of each row, computed in one packed batch."""
    batch = pack(rows)
    with torch.inference_mode():
        packed = forward(backbone.config, Frozen(backbone.tensors), batch)
    return [part.numpy() for part in packed.split(list(batch.lengths))]


def assert_same(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
    """Claim that hidden states agree within 1e-5, which is some ten roundings of numbers of this size."""
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5, rtol=0)


# --- every family


@pytest.mark.parametrize("pairs", [None, SECOND], ids=["texts", "pairs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_mixed_lengths_equals_transformers(
    family: str, pairs: list[str] | None, checkpoint: Checkpoint, tiny: Tiny
) -> None:
    model, backbone = checkpoint(family)[1], tiny(family)
    rows = backbone.tokenize(TEXTS, pairs)
    assert len({len(row) for row in rows}) > 3
    found = backbone.encode(TEXTS, pairs)
    types = family in WITH_TYPES
    assert_same(found, oracle(model, rows, types=types)[1:])
    assert_same(found, [oracle(model, [row], types=types)[1] for row in rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_has_the_same_states_alone_and_in_a_batch(family: str, tiny: Tiny) -> None:
    backbone = tiny(family)
    assert_same([backbone.encode(text)[0] for text in TEXTS], backbone.encode(TEXTS))
    assert_same(backbone.encode(TEXTS[2], SECOND[2]), [backbone.encode(TEXTS, SECOND)[2]])


@pytest.mark.parametrize("family", WITH_TYPES)
def test_token_types_change_the_output_as_in_transformers(family: str, checkpoint: Checkpoint, tiny: Tiny) -> None:
    model, backbone = checkpoint(family)[1], tiny(family)
    rows = random_rows(backbone, [9, 4, 17], types=2)
    assert any(row.types.any() for row in rows)
    found = hidden_states(backbone, rows)
    assert_same(found, oracle(model, rows, types=True)[1:])
    assert np.abs(found[0] - oracle(model, rows)[1]).max() > 1e-2


@pytest.mark.parametrize("family", ["roberta", "distilbert", "mpnet"])
def test_a_family_without_a_second_token_type_ignores_it(family: str, tiny: Tiny) -> None:
    backbone = tiny(family)
    rows = random_rows(backbone, [9, 4], types=2)
    plain = [Tokens(row.ids, np.zeros_like(row.types)) for row in rows]
    assert_same(hidden_states(backbone, rows), hidden_states(backbone, plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_the_maximum_length_equal_transformers(family: str, checkpoint: Checkpoint, tiny: Tiny) -> None:
    model, backbone = checkpoint(family)[1], tiny(family)
    assert backbone.config.max_length == 64
    rows = random_rows(backbone, [64, 63, 1, 64])
    assert_same(hidden_states(backbone, rows), oracle(model, rows)[1:])
    (cut,) = backbone.tokenize(["the cat " * 99])
    assert len(cut) == 64
    assert_same(backbone.encode("the cat " * 99), oracle(model, [cut])[1:])


@pytest.mark.parametrize("family", WITH_POOLER)
def test_the_pooler_is_a_tanh_layer_on_the_first_token(family: str, checkpoint: Checkpoint, tiny: Tiny) -> None:
    model, backbone = checkpoint(family)[1], tiny(family)
    rows = random_rows(backbone, [7, 12])
    first = torch.from_numpy(np.stack([states[0] for states in hidden_states(backbone, rows)]))
    assert backbone.has_pooler
    pooled = torch.tanh(Frozen(backbone.tensors).linear(first, "pooler"))
    assert_same([pooled.numpy()], [oracle(model, rows)[0].pooler_output.numpy()])


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WITH_POOLER)))
def test_a_family_without_a_pooler_has_none(family: str, tiny: Tiny) -> None:
    assert not tiny(family).has_pooler


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_checkpoint_is_used(family: str, checkpoint: Checkpoint, tiny: Tiny) -> None:
    model, backbone = checkpoint(family)[1], tiny(family)
    assert backbone.parameters == sum(parameter.numel() for parameter in model.parameters())


# --- variants of a family


@pytest.mark.parametrize(
    ("family", "changes", "length"),
    [
        ("mpnet", {"max_position_embeddings": 310}, 300),  # far beyond distance 128, from where all share a bucket
        ("albert", {"num_hidden_layers": 4, "num_hidden_groups": 2}, 20),
        ("albert", {"num_hidden_layers": 3, "num_hidden_groups": 2}, 20),
        ("albert", {"embedding_size": 32}, 20),
        ("electra", {"embedding_size": 32}, 20),
        ("roberta", {"pad_token_id": 0}, 20),
        ("roberta", {"type_vocab_size": 2}, 20),
        ("bert", {"type_vocab_size": 1}, 20),
        ("bert", {"layer_norm_eps": 1e-3}, 20),
        ("bert", {"num_attention_heads": 1}, 20),
    ],
    ids=str,
)
def test_a_variant_equals_transformers(family: str, changes: dict[str, Any], length: int, tmp_path: Path) -> None:
    model = save_random(family, tmp_path, **changes)
    backbone = load(str(tmp_path))
    rows = random_rows(backbone, [length, 3, length - 1])
    assert_same(hidden_states(backbone, rows), oracle(model, rows)[1:])


@pytest.mark.parametrize("activation", CHECKPOINT_ACTIVATIONS)
def test_every_activation_equals_transformers(activation: str, tmp_path: Path) -> None:
    model = save_random("bert", tmp_path, hidden_act=activation, num_hidden_layers=1)
    backbone = load(str(tmp_path))
    rows = random_rows(backbone, [20, 3])
    assert_same(hidden_states(backbone, rows), oracle(model, rows)[1:])


@pytest.mark.minilm
def test_the_real_minilm_equals_transformers(minilm: Backbone) -> None:
    from transformers import BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = BertModel.from_pretrained(minilm.folder).eval()
    texts = ["The film was better than I had feared.", "", "Größe, 東京 and 🙂!", "word " * 600]
    pairs = ["Was it good?", "An answer to nothing.", "?", "short"]
    assert minilm.config.max_length == 512
    for second in (None, pairs):
        rows = minilm.tokenize(texts, second)
        assert [len(row) for row in rows][-1] == 512
        found, (output, *theirs) = minilm.encode(texts, second), oracle(model, rows, types=True)
        assert_same(found, theirs)
        first = torch.from_numpy(np.stack([states[0] for states in found]))
        pooled = torch.tanh(Frozen(minilm.tensors).linear(first, "pooler"))
        assert_same([pooled.numpy()], [output.pooler_output.numpy()])


# --- what the pass promises beyond that


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.sampled_from(["bert", "mpnet", "roberta"]))
def test_neighbours_in_a_batch_do_not_matter(tiny: Tiny, lengths: list[int], family: str) -> None:
    backbone = tiny(family)
    rows = random_rows(backbone, lengths)
    assert_same(hidden_states(backbone, rows), [hidden_states(backbone, [row])[0] for row in rows])


def leaves(backbone: Backbone) -> dict[str, Tensor]:
    """Return copies of the encoder's tensors that take gradients."""
    return {name: tensor.clone().requires_grad_() for name, tensor in backbone.tensors.items()}


def batch_of(backbone: Backbone) -> PackedBatch:
    """Return a packed batch of three rows."""
    return pack(random_rows(backbone, [6, 11, 2]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_start_in_the_middle_has_the_same_result_to_the_bit(family: str, first: int, tiny: Tiny) -> None:
    backbone = tiny(family)
    batch, frozen = batch_of(backbone), Frozen(backbone.tensors)
    whole = forward(backbone.config, frozen, batch)
    assert torch.equal(forward(backbone.config, frozen, batch, first=first), whole)
    training = forward(backbone.config, Frozen(leaves(backbone)), batch, first=first)
    assert_same([training.detach().numpy()], [whole.numpy()])  # not to the bit: MPNet's bias then has another kernel


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"albert"}))
@pytest.mark.parametrize("first", [0, 1, 2])
def test_nothing_below_the_start_gets_a_gradient_and_all_above_does(family: str, first: int, tiny: Tiny) -> None:
    backbone = tiny(family)
    tensors = leaves(backbone)
    forward(backbone.config, Frozen(tensors), batch_of(backbone), first=first).square().sum().backward()
    expected = {
        name
        for name in tensors
        if name.startswith(tuple(f"layers.{i}." for i in range(first, 3))) or (first == 0 and "layers" not in name)
    } - {"pooler.weight", "pooler.bias"}
    assert {name for name, tensor in tensors.items() if tensor.grad is not None} == expected


def test_shared_layers_get_the_gradient_of_the_layers_above_the_start_alone(tiny: Tiny) -> None:
    backbone = tiny("albert")
    tensors = leaves(backbone)
    forward(backbone.config, Frozen(tensors), batch_of(backbone), first=2).square().sum().backward()
    assert all((tensor.grad is not None) == name.startswith("layers.0.") for name, tensor in tensors.items())


def test_with_all_layers_below_the_start_no_gradient_is_recorded(bert: Backbone) -> None:
    assert not forward(bert.config, Frozen(leaves(bert)), batch_of(bert), first=3).requires_grad
    with torch.no_grad():
        assert not forward(bert.config, Frozen(leaves(bert)), batch_of(bert)).requires_grad


def dropout_for(batch: PackedBatch, rows: Sequence[int], *, step: int = 0) -> Dropout:
    """Return the masks of a step for rows with these numbers in their run."""
    keys = row_keys(7, step, torch.tensor(rows))
    return Dropout(keys, batch.rows, batch.positions, rate=0.2, attention_rate=0.3)


def test_below_the_start_nothing_is_dropped(bert: Backbone) -> None:
    batch, frozen = batch_of(bert), Frozen(bert.tensors)
    plain = forward(bert.config, frozen, batch)
    assert torch.equal(forward(bert.config, frozen, batch, dropout_for(batch, [0, 1, 2]), first=3), plain)
    assert not torch.allclose(forward(bert.config, frozen, batch, dropout_for(batch, [0, 1, 2]), first=2), plain)


@pytest.mark.parametrize("family", ["bert", "mpnet", "albert"])
def test_a_row_trains_the_same_alone_and_beside_others(family: str, tiny: Tiny) -> None:
    backbone = tiny(family)
    rows = random_rows(backbone, [6, 11, 2, 11])
    together = pack(rows)
    states = forward(backbone.config, Frozen(backbone.tensors), together, dropout_for(together, [0, 1, 2, 3]))
    for i, expected in enumerate(states.split(list(together.lengths))):
        alone = pack([rows[i]])
        found = forward(backbone.config, Frozen(backbone.tensors), alone, dropout_for(alone, [i]))
        assert_same([found.numpy()], [expected.numpy()])


def test_rates_of_zero_change_nothing(bert: Backbone) -> None:
    batch = batch_of(bert)
    none = Dropout(row_keys(7, 0, torch.arange(3)), batch.rows, batch.positions, rate=0.0, attention_rate=0.0)
    plain = forward(bert.config, Frozen(bert.tensors), batch)
    assert torch.equal(forward(bert.config, Frozen(bert.tensors), batch, none), plain)


def test_the_encoder_is_never_modified(bert: Backbone) -> None:
    before = {name: tensor.clone() for name, tensor in bert.tensors.items()}
    bert.encode(TEXTS, SECOND)
    assert all(torch.equal(bert.tensors[name], tensor) for name, tensor in before.items())
