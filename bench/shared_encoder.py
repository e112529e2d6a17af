"""Memory that a training run costs a server: with the server's encoder shared, and with its own copy.

    python bench/shared_encoder.py --backbone minilm

Prints JSON: megabytes of the run's process after its first epoch (in total, and its proportional share of pages that
several processes use), and of the mapping of the encoder only. Linux only: the figures come from /proc/PID/smaps.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import tempfile
import time
from pathlib import Path

from adapterbank.encoder.backbone import load
from adapterbank.encoder.shared_memory import share
from adapterbank.serving.jobs.queue import JobQueue
from adapterbank.storage.bank import Bank

ROWS = "text,label\n" + "\n".join(
    f"The film was {('dull', 'warm')[i % 2]} {i},{('no', 'yes')[i % 2]}" for i in range(400)
)


def megabytes(text: str, name: str) -> float:
    """Sum up a figure of smaps."""
    return round(sum(map(int, re.findall(rf"^{name}: +(\d+) kB", text, re.MULTILINE))) * 1024 / 1e6, 1)


def measure(bank: Path, weights: int | None) -> dict[str, float]:
    """Train until the first epoch is complete, and measure the process."""
    jobs = JobQueue(bank, weights=weights)
    jobs.begin()
    with jobs.upload("csv") as upload:
        upload.write(ROWS.encode())
        run = jobs.submit("films", {"epochs": 50, "size": 64}, upload)
    while not jobs.get(run.id).history:
        assert not jobs.get(run.id).over, jobs.get(run.id).failure
        time.sleep(0.1)
    (child,) = {
        word for path in glob.glob(f"/proc/{os.getpid()}/task/*/children") for word in Path(path).read_text().split()
    }
    text = Path(f"/proc/{child}/smaps").read_text()
    found = {"resident": megabytes(text, "Rss"), "share": megabytes(text, "Pss")}
    if weights is not None:
        mapping = text[text.index("memfd:adapterbank-encoder") :].split("VmFlags", 1)[0]
        found |= {f"encoder {name}": megabytes(mapping, key) for name, key in (("resident", "Rss"), ("share", "Pss"))}
    jobs.cancel(run.id)
    jobs.close()
    return found


def main() -> None:
    """Measure both ways."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--backbone", default="minilm")
    name = options.parse_args().backbone
    backbone, descriptor = share(load(name))
    assert sum(float(tensor.sum()) for tensor in backbone.tensors.values())  # as a server, this process has it in use
    with tempfile.TemporaryDirectory() as folder:
        bank = Bank.open(Path(folder, "bank"), {"name": name, "sha256": backbone.sha256}, create=True)
        found = {"shared": measure(bank.path, descriptor), "copied": measure(bank.path, None)}
    print(json.dumps({"backbone": name, "megabytes": found}, indent=2))


if __name__ == "__main__":
    main()
