"""Options that only `adapterbank serve` has."""

from __future__ import annotations

from typing import Annotated

import typer

BankPlace = Annotated[str, typer.Option("--bank", help="Bank folder, or the URL of a bank.", show_default=False)]
Creates = Annotated[bool, typer.Option("--create", help="Create an empty bank if there is none; requires --backbone.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", help="Port to listen on; 0 picks a free one.", min=0, max=65535)]
KeysFile = Annotated[
    str | None, typer.Option("--keys", help="File of API keys (default: the bank's keys.json, if it exists).")
]
Budget = Annotated[
    int | None, typer.Option("--budget", help="Memory limit for loaded tasks, in megabytes (default: none).", min=1)
]
Queue = Annotated[
    int | None, typer.Option("--queue", help="Queue limit in tokens (default: 65,536; 262,144 on a GPU).", min=1)
]
MaxTexts = Annotated[int, typer.Option("--max-texts", help="Largest number of texts in a request.", min=1)]
MaxCharacters = Annotated[int, typer.Option("--max-characters", help="Largest length of a text in characters.", min=1)]
MaxRuns = Annotated[
    int,
    typer.Option("--max-runs", help="Training runs that one key may have queued; no limit for admin keys.", min=1),
]
MaxUploadRows = Annotated[int, typer.Option("--max-upload-rows", help="Largest number of rows of a data file.", min=2)]
MaxUploadText = Annotated[
    int, typer.Option("--max-upload-text", help="Largest length of a text of a data file in characters.", min=1)
]
MaxRunMinutes = Annotated[
    float,
    typer.Option("--max-run-minutes", help="Longest time of a training run; then it fails.", min=0.1, max=10**6),
]
MaxRunMemory = Annotated[
    int | None,
    typer.Option(
        "--max-run-memory", help="Memory limit of a training run in megabytes (default: half of the machine's).", min=1
    ),
]
Trains = Annotated[bool, typer.Option("--train/--no-train", help="Accept uploads of training data and train on them.")]
HasPage = Annotated[bool, typer.Option("--page/--no-page", help="Serve the web page at /.")]
MeasuredPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="fp32, bf16 or int8; auto: on a CPU the quickest, measured (default: fp32 on a CPU, bf16 on a GPU).",
    ),
]
Refresh = Annotated[
    float, typer.Option("--refresh", help="Seconds between checks of a bank behind a URL for changes.", min=0.1)
]
Replicas = Annotated[str, typer.Option("--replicas", help="Ray: number of replicas, or a range such as 1:4.")]
CpusPerReplica = Annotated[int, typer.Option("--cpus-per-replica", help="Ray: CPUs per replica.", min=1)]
TargetRequests = Annotated[
    int, typer.Option("--target-requests", help="Ray: concurrent requests per replica to aim for.", min=1)
]
