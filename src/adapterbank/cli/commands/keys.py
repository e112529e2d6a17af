"""`adapterbank keys add|list|revoke`: manage the API keys of a served bank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adapterbank.cli.console import guarded, print_json, print_message, print_table, print_text
from adapterbank.cli.options import AsJson
from adapterbank.errors import InputError
from adapterbank.serving.http.auth import FILE, Keys
from adapterbank.storage.bank import Bank

HELP = """Create, list and revoke the API keys of a served bank.

Example: adapterbank keys add --bank bank --name alice --scope predict

The file of keys stores a hash of each key, never the key itself. A running server applies changes at once; a server
that was started without keys requires them after its next start.
"""
app = typer.Typer(no_args_is_help=True)

BankPath = Annotated[
    str | None, typer.Option("--bank", help=f"Bank folder; its keys are in {FILE}.", show_default=False)
]
KeysPath = Annotated[
    str | None, typer.Option("--keys", help=f"File of keys, instead of the bank's {FILE}.", show_default=False)
]
Name = Annotated[str, typer.Option("--name", help="Name of the key in lists and logs.", show_default=False)]


def find_keys(bank: str | None, keys: str | None) -> Keys:
    """Return the keys of a file, or of an existing bank."""
    if keys is not None:
        return Keys(keys)
    if bank is None:
        raise InputError("No file of keys is named; give --bank FOLDER or --keys FILE.")
    return Keys(Bank.open(bank).path / FILE)


def add(
    name: Name,
    scope: Annotated[
        list[str],
        typer.Option("--scope", help="predict, train or admin (everything); can be repeated.", show_default=False),
    ],
    bank: BankPath = None,
    keys: KeysPath = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", help="Limit the key to this task; can be repeated (default: all tasks).", show_default=False
        ),
    ] = None,
    rate: Annotated[
        int | None, typer.Option("--rate", help="Requests per minute (default: no limit).", show_default=False)
    ] = None,
    json: AsJson = False,
) -> None:
    """Create a key and print its secret, once.

    Example: adapterbank keys add --bank bank --name alice --scope predict --task sentiment --rate 600

    Send the key in a header: curl -H "Authorization: Bearer $KEY" http://host:8000/v1/tasks
    """
    store = find_keys(bank, keys)
    secret = store.add(name, scope, task or None, rate)
    if json:
        (made,) = [key for key in store.list() if key.name == name]
        print_json({**made.to_json(), "key": secret})
        return
    print_text(secret)
    print_message(f"This is the secret of the key {name!r}. It is not stored and cannot be shown again.")


def list_(bank: BankPath = None, keys: KeysPath = None, json: AsJson = False) -> None:
    """List the keys with their scopes, tasks and limits.

    Example: adapterbank keys list --bank bank
    """
    listed = find_keys(bank, keys).list()
    if json:
        print_json([key.to_json() for key in listed])
        return
    if not listed:
        print_text("There are no keys yet. See: adapterbank keys add --help")
        return
    titles = ("name", "scopes", "tasks", "requests per minute", "created")
    rows = [
        (key.name, ",".join(key.scopes), ",".join(key.tasks or ["all"]), str(key.rate or "any"), key.created[:10])
        for key in listed
    ]
    print_table(titles, rows)


def revoke(name: Name, bank: BankPath = None, keys: KeysPath = None, json: AsJson = False) -> None:
    """Revoke a key; a running server rejects it from the next request on.

    Example: adapterbank keys revoke --bank bank --name alice
    """
    store = find_keys(bank, keys)
    store.revoke(name)
    if json:
        print_json({"revoked": name, "file": str(Path(store.path))})
    else:
        print_text(f"Revoked {name}.")


app.command("add")(guarded(add))
app.command("list")(guarded(list_))
app.command("revoke")(guarded(revoke))
