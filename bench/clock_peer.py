"""`adapters` in a plain loop, as a process from its start to a saved adapter. Does not import adapterbank.

    python bench/clock_peer.py --backbone FOLDER --train train.parquet --dev dev.parquet --out FOLDER --device cuda

The recipe is that of `adapterbank train`: a bottleneck adapter after both sub-layers (DoubleSeqBn), a linear head,
AdamW (fused on a GPU), a linear schedule, and a score on the dev rows after each epoch. A GPU computes under bf16
autocast. Batches are padded to their longest row and pinned, and losses are read once an epoch, so that the host does
not wait for the device in between. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worker_peers import Batch, build, collate

WARMUP, CLIP, LR, SCORED_AT_ONCE = 0.1, 1.0, 1e-3, 128


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=128)
    return parser.parse_args()


def read(path: Path, tokenizer: Any, most: int) -> dict[str, list[Any]]:
    """Read sentences and labels, and tokenise all sentences at once, which the fast tokenizer does in parallel."""
    import pyarrow.parquet as pq

    table = pq.read_table(path).to_pydict()
    rows = tokenizer(table["sentence"], truncation=True, max_length=most)["input_ids"]
    return {"rows": rows, "labels": table["label"]}


def part(data: dict[str, list[Any]], chosen: Any, device: torch.device) -> Batch:
    """Pad the chosen rows to the longest of them and send them to the device."""
    batch = collate({name: [values[i] for i in chosen] for name, values in data.items()}, device)
    ids, mask, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    return ids, mask, labels


class Loop:
    """The model, its optimiser and its schedule."""

    def __init__(self, model: Any, device: torch.device, steps: int) -> None:
        """Take the model on its device."""
        from transformers import get_linear_schedule_with_warmup

        self.model, self.device = model, device
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, fused=device.type == "cuda" or None)
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, int(WARMUP * steps), steps)

    def logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run the forward pass, under autocast on a GPU."""
        gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext():
            found: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        return found.float()

    def epoch(self, data: dict[str, list[Any]], order: np.ndarray, size: int) -> float:
        """Take the steps of an epoch; return their mean loss."""
        self.model.train()
        losses = []
        for first in range(0, len(order), size):
            ids, mask, labels = part(data, order[first : first + size], self.device)
            loss = torch.nn.functional.cross_entropy(self.logits(ids, mask), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, CLIP)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def score(self, data: dict[str, list[Any]]) -> float:
        """Return the accuracy; rows of similar length share a batch."""
        self.model.eval()
        order, right = np.argsort([len(row) for row in data["rows"]], kind="stable"), []
        with torch.inference_mode():
            for first in range(0, len(order), SCORED_AT_ONCE):
                ids, mask, labels = part(data, order[first : first + SCORED_AT_ONCE], self.device)
                right.append((self.logits(ids, mask).argmax(-1) == labels).sum())
        return int(torch.stack(right).sum()) / len(order)


def main() -> None:
    """Train, save the adapter and report each epoch's seconds."""
    options = parse()
    from transformers import AutoTokenizer

    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # for what autocast leaves in fp32
    tokenizer = AutoTokenizer.from_pretrained(options.backbone)
    train, dev = (read(path, tokenizer, options.max_length) for path in (options.train, options.dev))
    model = build({"backbone": options.backbone, "peer": "adapters", "size": options.size}).to(device)
    count = len(train["rows"])
    loop = Loop(model, device, options.epochs * -(-count // options.batch))
    draw, history = np.random.RandomState(0), []
    for _ in range(options.epochs):
        began = time.perf_counter()
        loss = loop.epoch(train, draw.permutation(count), options.batch)
        score = loop.score(dev)
        history.append({"loss": loss, "score": score, "seconds": time.perf_counter() - began})
    model.save_adapter(str(options.out), "task0")
    print(json.dumps({"history": history, "trained": sum(p.numel() for p in loop.trained)}), flush=True)


if __name__ == "__main__":
    main()
