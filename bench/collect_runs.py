"""Write the scores of a study's runs, one line of JSON each, as in `bench/results/tagging.json`.

    python bench/collect_runs.py minilm=results/minilm mpnet=results/mpnet --out bench/results/tagging.json

A word names a group and the folder of its records, as `adapterbank sweep --records FOLDER` writes them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = ("task", "method", "lr", "epochs", "seed", "max_length")


def run(path: Path) -> dict[str, Any]:
    """Return what a record says of its setting and its scores."""
    record = json.loads(path.read_text(encoding="utf-8"))
    config, metric = record["config"], record["task"]["metric"]
    found = {name: config[name] for name in NAMES} | {"metric": metric}
    found |= {"size": config["size"]} if config["method"] == "adapter" else {}
    found |= {name: config[name] for name in ("long", "window_pooling") if name in config}
    found |= {split: round(100 * scores[metric], 2) for split, scores in record["metrics"].items()}
    found |= {"best_epoch": record["best_epoch"], "percent": round(record["params"]["percent"], 2)}
    return found | ({"restarts": len(record["restarts"])} if record.get("restarts") else {})


def main() -> None:
    """Collect the runs of each group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = {}
    for group in options.groups:
        name, _, folder = group.partition("=")
        runs = [run(path) for path in Path(folder).glob("*.json")]
        found[name] = sorted(runs, key=lambda one: json.dumps(one, sort_keys=True))
    lines = [f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, runs)) + "\n]" for name, runs in found.items()]
    options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{sum(map(len, found.values()))} runs in {options.out}")


if __name__ == "__main__":
    main()
