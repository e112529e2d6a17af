"""Claims about loading: every copy that computes the same has one identity, and what cannot be used is refused."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapterbank.encoder.backbone import Backbone, load
from adapterbank.errors import BackboneError, InputError
from families import FAMILIES, save_random, vocabulary

Checkpoint = Callable[[str], tuple[Path, Any]]


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """Return a copy of the small BERT's folder."""
    return Path(shutil.copytree(checkpoint("bert")[0], tmp_path / "copy"))


def edit_json(path: Path, **changes: Any) -> None:
    """Change some values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


# --- identity: the same


def test_an_identity_is_a_sha256_and_the_same_on_every_load(copy: Path, bert: Backbone) -> None:
    assert re.fullmatch("[0-9a-f]{64}", bert.sha256)
    assert load(str(copy)).sha256 == bert.sha256


def sharded(folder: Path, model: Any) -> None:
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def pickled(folder: Path, model: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def pickled_in_shards(folder: Path, model: Any) -> None:
    (folder / "model.safetensors").unlink()
    parts: list[dict[str, Tensor]] = [{}, {}]
    for i, (name, tensor) in enumerate(model.state_dict().items()):
        parts[i % 2][name] = tensor
    where: dict[str, str] = {}
    for i, part in enumerate(parts):
        torch.save(part, folder / f"pytorch_model-0000{i + 1}-of-00002.bin")
        where |= dict.fromkeys(part, f"pytorch_model-0000{i + 1}-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))


def with_a_head(folder: Path, model: Any) -> None:
    from transformers import BertForSequenceClassification

    whole = BertForSequenceClassification(model.config)
    whole.bert.load_state_dict(model.state_dict())
    whole.save_pretrained(folder)
    assert all(name.startswith(("bert.", "classifier.")) for name in load_file(folder / "model.safetensors"))


def old_layer_norms(folder: Path, model: Any) -> None:
    def rename(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    edit_tensors(folder, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    assert any(name.endswith("LayerNorm.gamma") for name in load_file(folder / "model.safetensors"))


def more_than_the_encoder(folder: Path, model: Any) -> None:
    more = {"embeddings.position_ids": torch.arange(64)[None], "cls.predictions.bias": torch.zeros(128)}
    edit_tensors(folder, lambda tensors: tensors | more)


def other_dropout(folder: Path, model: Any) -> None:
    edit_json(folder / "config.json", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)


def other_notes_in_config(folder: Path, model: Any) -> None:
    edit_json(folder / "config.json", _name_or_path="elsewhere", transformers_version="4.0.0", id2label={"0": "no"})


def other_truncation_and_padding(folder: Path, model: Any) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    assert found["truncation"]
    assert found["padding"]
    edit_json(folder / "tokenizer.json", truncation=None, padding=None)


def other_layout_of_the_tokenizer_file(folder: Path, model: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))


SAME = [
    sharded,
    pickled,
    pickled_in_shards,
    with_a_head,
    old_layer_norms,
    more_than_the_encoder,
    other_dropout,
    other_notes_in_config,
    other_truncation_and_padding,
    other_layout_of_the_tokenizer_file,
]


@pytest.mark.parametrize("change", SAME, ids=lambda change: change.__name__)
def test_a_copy_that_computes_the_same_has_the_same_identity(
    change: Callable[[Path, Any], None], copy: Path, checkpoint: Checkpoint, bert: Backbone
) -> None:
    change(copy, checkpoint("bert")[1])
    found = load(str(copy))
    assert found.sha256 == bert.sha256
    assert found.tensors.keys() == bert.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in bert.tensors.items())


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"bert"}))
def test_a_head_in_the_checkpoint_does_not_change_the_encoder(
    family: str, checkpoint: Checkpoint, tmp_path: Path, tiny: Callable[[str], Backbone]
) -> None:
    import transformers

    folder, model = checkpoint(family)
    whole = getattr(transformers, f"{FAMILIES[family][0]}ForTokenClassification")(model.config)
    inner = getattr(whole, whole.base_model_prefix)
    inner.load_state_dict(model.state_dict(), strict=False)
    whole.save_pretrained(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    found, bare = load(str(tmp_path)), tiny(family)
    without = {name: tensor for name, tensor in bare.tensors.items() if not name.startswith("pooler.")}
    assert found.tensors.keys() == without.keys()  # a head on tokens has no use for a pooler
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in without.items())
    assert (found.sha256 == bare.sha256) == (not bare.has_pooler)


def test_safetensors_are_read_before_pickled_weights(copy: Path, bert: Backbone) -> None:
    (copy / "pytorch_model.bin").write_bytes(b"never opened")
    assert load(str(copy)).sha256 == bert.sha256


# --- identity: another


def halved(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()})


def one_number(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = tensors["encoder.layer.1.output.dense.weight"]
        weight[3, 5] = float(np.nextafter(np.float32(weight[3, 5]), np.float32(9)))
        return tensors

    edit_tensors(folder, change)


def two_tensors_exchanged(folder: Path) -> None:
    names = [f"encoder.layer.{i}.attention.self.query.weight" for i in (0, 1)]
    edit_tensors(folder, lambda tensors: tensors | dict(zip(names, [tensors[n] for n in reversed(names)], strict=True)))


def no_pooler(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if "pooler" not in n})


def another_activation(folder: Path) -> None:
    edit_json(folder / "config.json", hidden_act="relu")


def other_heads(folder: Path) -> None:
    edit_json(folder / "config.json", num_attention_heads=8)


def another_epsilon(folder: Path) -> None:
    edit_json(folder / "config.json", layer_norm_eps=1e-5)


def another_normalizer(folder: Path) -> None:
    normalizer = json.loads((folder / "tokenizer.json").read_text())["normalizer"]
    edit_json(folder / "tokenizer.json", normalizer=normalizer | {"lowercase": False})


def other_words(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"cat"', '"cow"'))


OTHER = [
    halved,
    one_number,
    two_tensors_exchanged,
    no_pooler,
    another_activation,
    other_heads,
    another_epsilon,
    another_normalizer,
    other_words,
]


@pytest.mark.parametrize("change", OTHER, ids=lambda change: change.__name__)
def test_a_copy_that_computes_something_else_has_another_identity(
    change: Callable[[Path], None], copy: Path, bert: Backbone
) -> None:
    change(copy)
    assert load(str(copy)).sha256 != bert.sha256


def test_two_copies_that_differ_only_in_case_folding_from_vocab_txt_have_two_identities(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    found = {load(str(copy)).sha256}
    (copy / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    found.add(load(str(copy)).sha256)
    (copy / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    found.add(load(str(copy)).sha256)
    assert len(found) == 2


# --- what a backbone gives


def test_half_precision_copies_are_loaded_as_float32(copy: Path) -> None:
    halved(copy)
    assert {tensor.dtype for tensor in load(str(copy)).tensors.values()} == {torch.float32}


def test_a_single_text_needs_no_list(bert: Backbone) -> None:
    (alone,), (first, _) = bert.encode("the cat"), bert.encode(["the cat", "dog"])
    np.testing.assert_allclose(alone, first, atol=1e-5)
    assert bert.encode("the cat", "why")[0].shape == (6, 32)
    assert bert.encode([]) == []


@pytest.mark.parametrize("limit", [65, 512])
def test_a_limit_beyond_the_encoders_positions_is_refused(bert: Backbone, limit: int) -> None:
    with pytest.raises(InputError, match=f"max_length {limit} is more than .* has positions for, 64"):
        bert.encode(["cat " * 999], max_length=limit)


def test_a_shorter_limit_cuts(bert: Backbone) -> None:
    assert [len(states) for states in bert.encode(["cat " * 99, "cat"], max_length=10)] == [10, 3]


# --- what is refused


def refusal(folder: Path) -> str:
    """Return the message that refuses a folder, which it names."""
    with pytest.raises(BackboneError) as caught:
        load(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_a_folder_without_a_config_is_refused(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "has no config.json" in refusal(copy)


@pytest.mark.parametrize("text", ["", "{", "not json", "\udcff"])
def test_a_config_that_is_not_json_is_named(copy: Path, text: str) -> None:
    (copy / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "config.json cannot be read as JSON" in refusal(copy)


def test_a_config_that_is_not_an_object_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("[]")
    assert "config.json does not contain a JSON object" in refusal(copy)


def test_a_folder_without_weights_names_the_files_it_needs(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "has no weights: model.safetensors or pytorch_model.bin" in refusal(copy)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    name = "encoder.layer.2.output.dense.bias"
    edit_tensors(copy, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    assert f"lack 1 of 55 tensors, first '{name}'" in refusal(copy)


def test_weights_of_another_family_are_refused(copy: Path, checkpoint: Checkpoint) -> None:
    shutil.copy(checkpoint("distilbert")[0] / "model.safetensors", copy)
    assert "Is it a bert encoder?" in refusal(copy)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    edit_json(copy / "config.json", intermediate_size=40)
    assert "encoder.layer.0.intermediate.dense.weight has shape (48, 32), but config.json implies (40, 32)" in refusal(
        copy
    )


def test_quantised_weights_are_refused(copy: Path) -> None:
    name = "encoder.layer.0.output.dense.weight"
    edit_tensors(copy, lambda tensors: tensors | {name: tensors[name].to(torch.int8)})
    assert f"{name} is torch.int8; quantised weights are not supported" in refusal(copy)


def test_a_missing_shard_is_named(copy: Path, checkpoint: Checkpoint) -> None:
    sharded(copy, checkpoint("bert")[1])
    lost = sorted(copy.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert f"is not whole: {lost.name} is missing" in refusal(copy)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_of_shards_is_named(copy: Path, text: str) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    (copy / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json does not name the files of the weights" in refusal(copy)


def test_an_index_cannot_name_files_outside_the_folder(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    assert "outside.safetensors is missing" in refusal(copy)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_weights_file_is_named(copy: Path, kept: int) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    message = refusal(copy)
    assert "model.safetensors cannot be read" in message
    assert "Fetch it again" in message


class Malice:
    """An object whose unpickling would make a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_pickle_is_not_executed(copy: Path, tmp_path: Path, how: str) -> None:
    (copy / "model.safetensors").unlink()
    content = {"embeddings.word_embeddings.weight": Malice(tmp_path / "harm")}
    if how == "torch":
        torch.save(content, copy / "pytorch_model.bin")
    else:
        (copy / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    assert "pytorch_model.bin is not a file of plain weights" in refusal(copy)
    assert not (tmp_path / "harm").exists()
    with (copy / "pytorch_model.bin").open("rb") as file:  # a reader that trusts the file would do it
        torch.load(file, weights_only=False) if how == "torch" else pickle.load(file)
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", None])
def test_a_bin_file_without_weights_is_named(copy: Path, content: bytes | None) -> None:
    (copy / "model.safetensors").unlink()
    if content is None:
        torch.save([torch.zeros(2)], copy / "pytorch_model.bin")
    else:
        (copy / "pytorch_model.bin").write_bytes(content)
    message = refusal(copy)
    assert "pytorch_model.bin is not a file of plain weights" in message
    assert "Convert it to safetensors" in message


def test_a_tokenizer_with_more_tokens_than_the_encoder_is_refused(tmp_path: Path) -> None:
    save_random("bert", tmp_path, vocab_size=80)
    last = len(vocabulary()) - 1
    assert f"highest token id is {last}, but the encoder has 80 embeddings" in refusal(tmp_path)


def test_one_token_beyond_the_encoders_last_is_refused(copy: Path) -> None:
    vocab = json.loads((copy / "tokenizer.json").read_text())["model"]
    vocab["vocab"]["far"] = 500
    edit_json(copy / "tokenizer.json", model=vocab)
    assert "highest token id is 500, but the encoder has 128 embeddings" in refusal(copy)
