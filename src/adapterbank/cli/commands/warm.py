"""`adapterbank warm`: compile a GPU's kernels ahead, so that no training and no server waits for a compiler."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from adapterbank.cli.console import format_count, print_json, print_text
from adapterbank.cli.options import AsJson, BackboneName, Device, OptionalBankPath, Precision, bank_defaults

HELP = """Compile ahead what training and answers need on this machine's GPU.

Compiled kernels are kept in the folder of Triton's cache, ~/.triton/cache or TRITON_CACHE_DIR, and used by every later
process. An image that contains this folder starts as quickly on every machine with the same kind of GPU, the same
versions of torch and Triton, and the same encoder. Without this command, kernels are compiled beside the first steps
of a training, and before a server reports that it is ready.

Example: adapterbank warm --backbone minilm --size 8 --size 64
"""


def command(
    bank: OptionalBankPath = None,
    backbone: BackboneName = None,
    size: Annotated[
        list[int] | None,
        typer.Option("--size", help="Adapter size; can be repeated (default: 64, or those of the bank).", min=1),
    ] = None,
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Tokens of the longest texts.")] = 128,
    device: Device = "auto",
    precision: Precision = "auto",
    json: AsJson = False,
) -> None:
    """See `HELP`."""
    from adapterbank.api.progress import Stages
    from adapterbank.api.warm import warm_up

    began = time.perf_counter()
    name = backbone or bank_defaults(bank).get("backbone") or "minilm"
    with Stages(quiet=json) as stages:
        done = warm_up(
            name,
            bank,
            sizes=size,
            max_length=max_length,
            device=device,
            precision=precision,
            watch=stages.watcher("compiling"),
        )
    found = {"backbone": name, "forms": done.forms, "seconds": time.perf_counter() - began, "folder": str(done.folder)}
    if json:
        print_json(found)
        return
    forms = format_count(done.forms, "form")
    print_text(f"Compiled {forms} of tasks for {name} in {found['seconds']:.0f} s, into {done.folder}")
