"""Scores and calibration of the default recipe, from the records of `configs/defaults-minilm.yaml`.

    python bench/defaults.py --records records --before results/records/minilm --out bench/results/defaults.json

`--before` are the records of an earlier revision: its runs of adapters of size 64 at 1e-3 with as many epochs are shown
beside those of now. The error of chance is what probabilities that are exactly right would show on as many rows: in a
bin of n rows with probability p, the share of right answers differs from p by sqrt(2 p (1 - p) / (pi n)) on average.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(folder: Path) -> dict[str, list[Record]]:
    """Return the records of a folder by task."""
    found: dict[str, list[Record]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "task" in record:
            found[record["task"]["name"]].append(record)
    return found


def score(records: list[Record], split: str) -> dict[str, float] | None:
    """Return mean and standard error of the task's metric over the seeds, in points."""
    values = [100 * one["metrics"][split][one["task"]["metric"]] for one in records if split in one["metrics"]]
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": round(statistics.mean(values), 2), "standard_error": round(error, 2), "seeds": len(values)}


def error_of_chance(bins: list[dict[str, float]]) -> float:
    """Return the calibration error that exact probabilities would show on as many rows."""
    rows = sum(one["rows"] for one in bins)
    filled = [(one["rows"], one["confidence"]) for one in bins if one["rows"]]
    return sum(n / rows * math.sqrt(2 * p * (1 - p) / (math.pi * n)) for n, p in filled)


def row(task: str, records: list[Record], before: list[Record]) -> dict[str, Any]:
    """Return what is reported of one task."""
    found: dict[str, Any] = {"task": task, "metric": records[0]["task"]["metric"]}
    found |= {split: score(records, split) for split in ("dev", "test")}
    found["one_answer"] = sum(any("for every dev row" in note for note in one["notes"]) for one in records)
    found["restarted"] = sum(bool(one.get("restarts")) for one in records)
    tests = [one["calibration"]["test"] for one in records if "test" in one.get("calibration", {})]
    if tests:
        found["test_rows"] = sum(one["rows"] for one in tests[0]["reliability"])
        found["calibration_error"] = round(statistics.mean(one["calibration_error"] for one in tests), 4)
        found["error_of_chance"] = round(statistics.mean(error_of_chance(one["reliability"]) for one in tests), 4)
    epochs = records[0]["config"]["epochs"]
    same = [one for one in before if _default(one["config"]) and one["config"]["epochs"] == epochs]
    return found | ({"before": {split: score(same, split) for split in ("dev", "test")}} if same else {})


def _default(config: dict[str, Any]) -> bool:
    return config["method"] == "adapter" and config["size"] == 64 and config["lr"] == 1e-3 and not config["limit"]


def main() -> None:
    """Write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    records, before = read(options.records), read(options.before)
    rows = [row(task, mine, before.get(task, [])) for task, mine in sorted(records.items())]
    second = [one for one in rows if one["task"].startswith("paper-")]
    whole = {
        "runs": sum(map(len, records.values())),
        "calibration_error_table2": round(statistics.mean(one["calibration_error"] for one in second), 4),
        "error_of_chance_table2": round(statistics.mean(one["error_of_chance"] for one in second), 4),
        "stamp": next(iter(records.values()))[0]["stamp"],
    }
    lines = ",\n".join(json.dumps(one) for one in rows)
    options.out.write_text(f'{json.dumps(whole)[:-1]}, "tasks": [\n{lines}\n]}}\n', encoding="utf-8")
    print(json.dumps(whole))


if __name__ == "__main__":
    main()
