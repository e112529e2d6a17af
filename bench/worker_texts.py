"""A worker that answers texts: adapterbank's own engine, `transformers` or ONNX Runtime, from text to label.

Run by `texts.py`. Each contestant gets the texts as strings and returns a label with its probability for each, so that
tokenising, padding and softmax count on every side. The peers have no adapters, only a head.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pace import Blocks, answer, memory, next_order

Answer = Callable[[Sequence[str]], list[Any]]

NAMES = ("input_ids", "attention_mask", "token_type_ids")


def own(setup: dict[str, Any]) -> Answer:
    """Return adapterbank's engine with a task of random adapters."""
    from adapterbank.encoder.backbone import load
    from adapterbank.inference.engine import Engine
    from adapterbank.methods import Options
    from adapterbank.slots.plan import Head, make_plan
    from adapterbank.tasks.spec import Examples, Task
    from adapterbank.training.builder import initial_tensors

    backbone = load(setup["backbone"])
    engine = Engine(backbone, device="cpu", precision=setup["precision"])
    plan = make_plan(Options(size=setup["size"]), depth=backbone.config.layers, head=Head("classification", 2, "first"))
    tensors = {name: t.numpy() for name, t in initial_tensors(plan, backbone, sigma=1e-2, seed=0).items()}
    task = Task("bench", "classification", ("text",), "label", ("no", "yes"), "accuracy")
    engine.put("bench", task, plan, tensors, backbone.config.max_length)
    return lambda texts: engine.predict_json([("bench", Examples(list(texts)))])[0]


def transformers(setup: dict[str, Any]) -> Answer:
    """Return the library's own model in eager mode, with its fused attention."""
    import torch

    tokenizer, model = tokenizer_of(setup), model_of(setup, "sdpa")

    def run(texts: Sequence[str]) -> list[Any]:
        with torch.inference_mode():
            inputs = {name: torch.from_numpy(array) for name, array in arrays(tokenizer, texts).items()}
            return labels(model(**inputs).logits.numpy())

    return run


def onnx(setup: dict[str, Any]) -> Answer:
    """Return an ONNX Runtime session: exported by torch, all optimisations, for int8 its own dynamic quantisation."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = setup["threads"]
    with tempfile.TemporaryDirectory() as work:
        session = ort.InferenceSession(str(exported(setup, Path(work))), options, providers=["CPUExecutionProvider"])
    tokenizer, names = tokenizer_of(setup), [given.name for given in session.get_inputs()]

    def run(texts: Sequence[str]) -> list[Any]:
        inputs = arrays(tokenizer, texts)
        return labels(session.run(None, {name: inputs[name] for name in names})[0])

    return run


def exported(setup: dict[str, Any], work: Path) -> Path:
    """Export the model with a head of two labels, in the setup's precision."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    axes = {name: {0: "rows", 1: "tokens"} for name in NAMES}
    inputs = tuple(torch.ones(2, 9, dtype=torch.long) for _ in NAMES)
    file = work / "model.onnx"
    torch.onnx.export(
        model_of(setup, "eager"),
        inputs,
        str(file),
        input_names=list(NAMES),
        output_names=["logits"],
        dynamic_axes=axes,
        opset_version=17,
        dynamo=False,
    )
    if setup["precision"] == "fp32":
        return file
    quantize_dynamic(str(file), str(work / "int8.onnx"), weight_type=QuantType.QInt8)
    return work / "int8.onnx"


def model_of(setup: dict[str, Any], attention: str) -> Any:
    """Return `transformers`' model with a head of two labels."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        setup["backbone"], num_labels=2, attn_implementation=attention
    ).eval()


def tokenizer_of(setup: dict[str, Any]) -> Any:
    """Return the fast tokenizer itself, padding to the longest text of a call."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(setup["backbone"]) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    return tokenizer


def arrays(tokenizer: Any, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Tokenise texts, padded to the longest."""
    found = tokenizer.encode_batch(list(texts))
    columns = ([e.ids for e in found], [e.attention_mask for e in found], [e.type_ids for e in found])
    return {name: np.array(column) for name, column in zip(NAMES, columns, strict=True)}


def labels(logits: np.ndarray) -> list[Any]:
    """Return each row's label and its probability."""
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return [{"label": int(row.argmax()), "probability": float(row.max())} for row in shares]


WHO: dict[str, Callable[[dict[str, Any]], Answer]] = {"own": own, "transformers": transformers, "onnx": onnx}


def main() -> None:
    """Serve one driver: an order says how many texts a call has."""
    setup = next_order()["setup"]
    run, texts = WHO[setup["who"]](setup), setup["texts"]
    answer({"ready": True})
    while True:
        order = next_order()
        calls = itertools.cycle([texts[i : i + order["texts"]] for i in range(0, len(texts), order["texts"])])
        run(next(calls))
        blocks = Blocks(order, lambda: None)
        while True:
            run(next(calls))
            if blocks.add(1):
                break
        answer({"seconds": [seconds / order["texts"] for seconds in blocks.found], **memory("cpu")})


if __name__ == "__main__":
    main()
