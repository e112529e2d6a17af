"""A server without HTTP, as a process: builds what `adapterbank serve` builds, gets ready and answers one batch.

    PYTHONPATH=src python bench/clock_engine.py --bank FOLDER --device cuda

For machines without the libraries of HTTP. It prints `ready` where a server would answer /readyz with 200, and
`answered` after one batch of every task of the bank.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from adapterbank.encoder.backbone import load
from adapterbank.inference.engine import Engine
from adapterbank.runtime import keep_few_primitives, use_few_threads_for_texts
from adapterbank.serving.service.protocol import Ask
from adapterbank.serving.service.service import BankService
from adapterbank.storage.bank import Bank

TEXTS = ["The film is a long and slow story about two men.", "One of the best of the year.", "Not a good plan."]
ROWS = 32
"""Rows of the batch that is answered, over all tasks."""


def service(path: Path, device: str) -> BankService:
    """Build the service as `serving.build` does, without an app."""
    keep_few_primitives()
    backbone = load(Bank.open(path).backbone["name"])
    bank = Bank.open(path, backbone.reference)
    engine = Engine(backbone, device=device)
    engine.use_graphs()
    if engine.ahead:
        use_few_threads_for_texts()
    return BankService(bank, engine)


async def serve(running: BankService) -> None:
    """Start, wait until it is ready, answer one batch, and stop."""
    await running.start()
    while not running.ready:
        await asyncio.sleep(0.005)
    print("ready", flush=True)
    names = running.bank.names()
    each = -(-ROWS // len(names))
    texts = (TEXTS * each)[:each]
    await running.predict([Ask(name, texts) for name in names])
    print("answered", flush=True)
    await running.stop()


def main() -> None:
    """Serve one batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bank", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    asyncio.run(serve(service(options.bank, options.device)))


if __name__ == "__main__":
    main()
