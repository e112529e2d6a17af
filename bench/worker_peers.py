"""A peer in an environment of its own: takes training steps when told to. Knows nothing of adapterbank.

Reads JSON lines on standard input and answers each with one: {"setup": {...}}, then {"steps": n} any number of times.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np
import torch


def build(setup: dict[str, Any]) -> tuple[Any, torch.device]:
    """Make the peer's model on the given weights, with what it trains by its own rules."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    folder, peer = setup["backbone"], setup["peer"]
    if peer == "adapters":
        from adapters import AutoAdapterModel, DoubleSeqBnConfig

        model = AutoAdapterModel.from_pretrained(folder)
        factor = model.config.hidden_size // 64
        model.add_adapter("task", config=DoubleSeqBnConfig(reduction_factor=factor, non_linearity="gelu_new"))
        model.add_classification_head("task", num_labels=2, layers=1)
        model.train_adapter("task")
        model.set_active_adapters("task")
    else:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
        if peer == "peft":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"]))
    device = torch.device(setup["device"])
    return model.to(device).train(), device


def pad(rows: list[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest row, as a data collator does."""
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}


def main() -> None:
    """Serve one driver."""
    setup = json.loads(sys.stdin.readline())["setup"]
    model, device = build(setup)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    batches, at = setup["batches"], 0
    print(json.dumps({"ready": sum(p.numel() for p in trained)}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(json.loads(line)["steps"]):
            batch = batches[at % len(batches)]
            at += 1
            began = time.perf_counter()
            inputs = pad(batch["rows"], device)
            labels = torch.tensor(batch["labels"], device=device)
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            times.append(time.perf_counter() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"seconds": times, "peak_kb": peak}), flush=True)


if __name__ == "__main__":
    main()
