"""`adapters` predicting rows of many tasks one at a time, in its own environment. Does not import adapterbank.

Reads JSON from standard input (backbone, tasks, size, seconds, rows of token ids) and prints rows per second.
"""

from __future__ import annotations

import json
import random
import sys
import time
from importlib.metadata import version


def main() -> None:
    """Switch to each row's task and run the row."""
    import torch
    import transformers
    from adapters import AutoAdapterModel, DoubleSeqBnConfig

    transformers.logging.set_verbosity_error()
    setup = json.load(sys.stdin)
    model = AutoAdapterModel.from_pretrained(setup["backbone"])
    factor = model.config.hidden_size // setup["size"]
    names = [f"task{i}" for i in range(setup["tasks"])]
    for name in names:
        model.add_adapter(name, config=DoubleSeqBnConfig(reduction_factor=factor, non_linearity="gelu_new"))
        model.add_classification_head(name, num_labels=2, layers=1)
    model.eval()
    rows = [torch.tensor([row]) for row in setup["rows"]]
    draw, done, began = random.Random(0), 0, 0.0
    with torch.inference_mode():
        ends = float("inf")
        while time.perf_counter() < ends:
            if done == 20:  # end of the warm-up
                began = time.perf_counter()
                ends = began + setup["seconds"]
            name = draw.choice(names)
            model.set_active_adapters(name)
            model.active_head = name
            model(input_ids=rows[done % len(rows)])
            done += 1
    rate = (done - 20) / (time.perf_counter() - began)
    json.dump({"rows_per_second": rate, "adapters": version("adapters")}, sys.stdout)


if __name__ == "__main__":
    main()
