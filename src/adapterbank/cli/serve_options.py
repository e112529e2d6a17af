"""The options of `adapterbank serve` that no other command has. Knows what they are called, and not what they do."""

from __future__ import annotations

from typing import Annotated

import typer

BankPlace = Annotated[str, typer.Option("--bank", help="The bank's folder, or a URL of one.", show_default=False)]
Creates = Annotated[bool, typer.Option("--create", help="Make the bank, empty, where there is none; needs --backbone.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 for any free one.", min=0, max=65535)]
KeysFile = Annotated[
    str | None, typer.Option("--keys", help="File of API keys (default: the bank's, where it has some).")
]
Budget = Annotated[
    int | None, typer.Option("--budget", help="Megabytes that tasks may take in memory (default: any).", min=1)
]
Queue = Annotated[
    int | None, typer.Option("--queue", help="Tokens that may wait (default: 65,536; 262,144 on a GPU).", min=1)
]
MaxTexts = Annotated[int, typer.Option("--max-texts", help="Texts of one request.", min=1)]
MaxCharacters = Annotated[int, typer.Option("--max-characters", help="Characters of one text.", min=1)]
MaxRuns = Annotated[
    int, typer.Option("--max-runs", help="Training runs of one key that may wait; admin keys have no limit.", min=1)
]
Trains = Annotated[bool, typer.Option("--train/--no-train", help="Take data files and train on them.")]
HasPage = Annotated[bool, typer.Option("--page/--no-page", help="Show a page at /.")]
Refresh = Annotated[float, typer.Option("--refresh", help="Seconds between two looks at a bank behind a URL.", min=0.1)]
EngineName = Annotated[str, typer.Option("--engine", help="Where it is served: local or ray.")]
RayAddress = Annotated[
    str | None, typer.Option("--ray-address", help="The cluster (default: as RAY_ADDRESS says, or one made here).")
]
Replicas = Annotated[str, typer.Option("--replicas", help="Ray: how many, or the least and most: 1:4.")]
CpusPerReplica = Annotated[int, typer.Option("--cpus-per-replica", help="Ray: CPUs of a replica.", min=1)]
TargetRequests = Annotated[
    int, typer.Option("--target-requests", help="Ray: requests a replica should have at a time.", min=1)
]
