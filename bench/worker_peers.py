"""A peer's worker in its own environment: trains and infers on order. Does not import adapterbank.

Each peer runs at its best: batches are collated and pinned ahead, AdamW is fused on a GPU, nothing waits for the device
within a block of steps, and the driver runs autocast and whole-model bf16 and counts the faster one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from pace import Blocks, answer, memory, next_order, synchronizer

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NO_LABEL = -100
"""The label of a token that is no word's first, which the loss ignores."""


def build(setup: dict[str, Any]) -> Any:
    """Build the peer's model on the given weights for `tasks` tasks; it trains what the peer trains by default."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    folder, peer = setup["backbone"], setup["peer"]
    names = [f"task{i}" for i in range(setup.get("tasks", 1))]
    tagging, outputs = setup.get("kind") == "tagging", setup.get("outputs", 2)
    if peer == "adapters":
        from adapters import AutoAdapterModel, DoubleSeqBnConfig

        model = AutoAdapterModel.from_pretrained(folder)
        factor = model.config.hidden_size // setup["size"]
        for name in names:
            model.add_adapter(name, config=DoubleSeqBnConfig(reduction_factor=factor, non_linearity="gelu_new"))
            if tagging:
                model.add_tagging_head(name, num_labels=outputs, layers=1)
            else:
                model.add_classification_head(name, num_labels=outputs, layers=1)
        model.train_adapter(names[0])
        model.set_active_adapters(names[0])
        return model
    of_kind = "AutoModelForTokenClassification" if tagging else "AutoModelForSequenceClassification"
    model = getattr(transformers, of_kind).from_pretrained(folder, num_labels=outputs)
    if peer == "peft":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="TOKEN_CLS" if tagging else "SEQ_CLS", r=8, target_modules=["query", "value"])
        model = get_peft_model(model, config, adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, config)
        model.set_adapter(names[0])
    return model


def collate(batch: dict[str, Any], device: torch.device) -> Batch:
    """Pad a batch to its longest row, as a data collator does, and pin it if it will be copied to a GPU."""
    rows = batch["rows"]
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    labels = [
        label + [NO_LABEL] * (longest - len(label)) if isinstance(label, list) else label for label in batch["labels"]
    ]
    made = torch.from_numpy(ids), torch.from_numpy(mask), torch.tensor(labels)
    return tuple(t.pin_memory() for t in made) if device.type == "cuda" else made


class Worker:
    """One peer's model with the driver's setup."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """Build the model on the device, in the requested precision."""
        self.setup, self.device = setup, torch.device(setup["device"])
        self.model = build(setup).to(self.device)
        if setup["precision"] == "bf16":
            self.model.to(torch.bfloat16)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=fused or None)
        mode = setup.get("compile")
        self.call = torch.compile(self.model, mode=None if mode == "default" else mode) if mode else self.model
        self.replayed = mode == "reduce-overhead"
        self.cases = {
            name: [collate(batch, self.device) for batch in batches] for name, batches in setup["cases"].items()
        }
        self.calls = 0
        self.split: list[str] = []  # adapters: the tasks that are set active

    def precision(self) -> Any:
        """Return the context that the pass runs in."""
        if self.setup["precision"] == "autocast":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def batch(self, case: str) -> Batch:
        """Copy the next batch to the device."""
        batch = self.cases[case][self.calls % len(self.cases[case])]
        self.calls += 1
        return tuple(t.to(self.device, non_blocking=True) for t in batch)

    def _begin(self, *, training: bool) -> None:
        """Prepare for a pass. The mode is set only where it changes, because that walks through all modules."""
        if self.model.training != training:
            self.model.train(training)
        if self.replayed:
            torch.compiler.cudagraph_mark_step_begin()

    def train_step(self, order: dict[str, Any]) -> None:
        """Take one step: forward, backward, clip, optimiser."""
        self._begin(training=True)
        ids, mask, labels = self.batch(order["case"])
        with self.precision():
            logits = self.call(input_ids=ids, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=NO_LABEL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.detach()  # read when the order is complete

    def infer_step(self, order: dict[str, Any]) -> None:
        """Predict one batch, logits back on the host: rows of one task, of all tasks, or of all tasks one by one."""
        self._begin(training=False)
        ids, mask, _ = self.batch(order["case"])
        with torch.inference_mode(), self.precision():
            logits = getattr(self, f"_{self.setup['peer']}_{order['tasks']}")(ids, mask)
        logits.float().cpu()

    def _names(self, rows: int) -> list[str]:
        return [f"task{i % self.setup['tasks']}" for i in range(rows)]

    def _full_one(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.call(input_ids=ids, attention_mask=mask).logits

    def _adapters_one(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.split != ["task0"]:
            self.model.set_active_adapters("task0")
            self.split = ["task0"]
        return self.model(input_ids=ids, attention_mask=mask).logits

    def _adapters_mixed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        names = self._names(len(ids))
        if self.split != names:  # the tasks do not change from call to call, so the peer pays for this once
            from adapters.composition import BatchSplit

            self.model.active_adapters = BatchSplit(*names, batch_sizes=[1] * len(names))
            self.model.active_head = BatchSplit(*names, batch_sizes=[1] * len(names))
            self.split = names
        return torch.cat([part.logits for part in self.model(input_ids=ids, attention_mask=mask)])

    def _adapters_switched(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found, self.split = [], []
        for i, name in enumerate(self._names(len(ids))):
            self.model.set_active_adapters(name)
            found.append(self.model(input_ids=ids[i : i + 1], attention_mask=mask[i : i + 1]).logits)
        return torch.cat(found)

    def _peft_one(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits

    def _peft_mixed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask, adapter_names=self._names(len(ids))).logits

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute one order."""
        step: Callable[[dict[str, Any]], None] = {"train": self.train_step, "infer": self.infer_step}[order["do"]]
        blocks = Blocks(order, synchronizer(self.device))
        done = False
        while not done:
            step(order)
            done = blocks.add(1)
        if order["do"] == "train" and not torch.isfinite(self.loss):
            raise RuntimeError("the loss is not finite")
        return {"seconds": blocks.found, **memory(self.device.type)}


def main() -> None:
    """Serve one driver."""
    setup = next_order()["setup"]
    if setup["device"] != "cpu":
        torch.set_float32_matmul_precision("high")  # for what autocast leaves in fp32
    worker = Worker(setup)
    versions = {name: version(name) for name in ("torch", "transformers", "adapters", "peft")}
    answer({"trained": sum(p.numel() for p in worker.trained), "versions": versions})
    while True:
        answer(worker.obey(next_order()))


if __name__ == "__main__":
    main()
