"""`adapterbank keys add|list|revoke`: who may use a served bank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adapterbank.cli.console import AsJson, guarded, print_json, print_table
from adapterbank.errors import InputError
from adapterbank.serving.http.auth import FILE, Keys
from adapterbank.storage.bank import Bank

app = typer.Typer(
    no_args_is_help=True,
    help="""Make, list and revoke the API keys of a served bank.

Example: adapterbank keys add --bank bank --name alice --scope predict

The file holds a hash of each key, never the key itself. A running server sees a change at once; one that was started
without keys asks for them from its next start on.
""",
)

BankPath = Annotated[
    str | None, typer.Option("--bank", help=f"The bank's folder; its keys are in {FILE} there.", show_default=False)
]
KeysPath = Annotated[
    str | None, typer.Option("--keys", help="The file of keys, where it is not the bank's.", show_default=False)
]
Name = Annotated[str, typer.Option("--name", help="What the key is called in lists and logs.", show_default=False)]


def find(bank: str | None, keys: str | None) -> Keys:
    """Give the keys of a file, or those of a bank that is there."""
    if keys is not None:
        return Keys(keys)
    if bank is None:
        raise InputError("Whose keys? Give --bank DIR, or --keys FILE.")
    return Keys(Bank.open(bank).path / FILE)


def add(
    name: Name,
    scope: Annotated[
        list[str],
        typer.Option("--scope", help="predict, train or admin, which may do all; may be repeated.", show_default=False),
    ],
    bank: BankPath = None,
    keys: KeysPath = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="Only for this task; may be repeated (default: all).", show_default=False),
    ] = None,
    rate: Annotated[
        int | None, typer.Option("--rate", help="Requests a minute (default: no limit).", show_default=False)
    ] = None,
    json: AsJson = False,
) -> None:
    """Make a key and show its secret, once.

    Example: adapterbank keys add --bank bank --name alice --scope predict --task sentiment --rate 600

    Use it as a header: curl -H "Authorization: Bearer $KEY" http://host:8000/v1/tasks
    """
    held = find(bank, keys)
    secret = held.add(name, scope, task or None, rate)
    if json:
        (made,) = [key for key in held.list() if key.name == name]
        print_json({**made.to_json(), "key": secret})
        return
    typer.echo(secret)
    typer.echo(f"This is the key {name!r}; it is not kept and cannot be shown again.", err=True)


def list_(bank: BankPath = None, keys: KeysPath = None, json: AsJson = False) -> None:
    """List the keys: what each may do, and since when.

    Example: adapterbank keys list --bank bank
    """
    held = find(bank, keys).list()
    if json:
        print_json([key.to_json() for key in held])
        return
    if not held:
        typer.echo("There are no keys yet. See: adapterbank keys add --help")
        return
    titles = ("name", "scopes", "tasks", "requests a minute", "made")
    rows = [
        (key.name, ",".join(key.scopes), ",".join(key.tasks or ["all"]), str(key.rate or "any"), key.created[:10])
        for key in held
    ]
    print_table(titles, rows)


def revoke(name: Name, bank: BankPath = None, keys: KeysPath = None, json: AsJson = False) -> None:
    """Revoke a key; a running server refuses it from the next request on.

    Example: adapterbank keys revoke --bank bank --name alice
    """
    held = find(bank, keys)
    held.revoke(name)
    if json:
        print_json({"revoked": name, "file": str(Path(held.path))})
    else:
        typer.echo(f"Revoked {name}.")


app.command("add")(guarded(add))
app.command("list")(guarded(list_))
app.command("revoke")(guarded(revoke))
