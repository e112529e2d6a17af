"""Proof of no forgetting: a package's files and its outputs on fixed texts are what they were. Knows no training.

When a task is put into a bank its outputs on `PROBES` are kept with a stamp of the machine. An audit computes them
again: to the bit where the stamp promises that, else within `TOLERANCE`, and it says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapterbank.encoder.backbone import Backbone
from adapterbank.errors import AdapterbankError, BackboneMismatch, PackageDamaged
from adapterbank.inference.engine import Engine
from adapterbank.runtime import same_bits, stamp
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import Package

PROBES = (
    ("The service was quick and the food better than we had hoped.", "Nothing about that evening was worth the price."),
    ("Why does the river rise in spring?", "Melting snow in the mountains makes the river rise each spring."),
    ("ok", "No."),
    ("Shares fell 3.5% on Monday, after the bank cut its outlook for 2019.", "Markets were lower at the open."),
    ("He said that she said that they had never been there at all.", "Someone denied having been somewhere."),
    ("¿Qué? 日本語 🙂 naïve café — #hashtag @user http://example.org", "Mixed scripts and symbols."),
)
"""Fixed texts, short and long, plain and odd. A change here would make every older fingerprint incomparable."""

TOLERANCE = 1e-4
"""How far outputs may move between machines or torch versions in fp32: rounding moves them by about 1e-6."""


@dataclass(frozen=True)
class Finding:
    """What an audit says of one version of a task."""

    ref: str
    ok: bool
    how: str
    """Compared `to the bit` or `within 0.0001`, or what is wrong."""
    difference: float = 0.0
    """The largest difference of any output."""


def fingerprint(engine: Engine, name: str) -> dict[str, Any]:
    """Return a resident task's outputs on the probes and the stamp of this machine."""
    return {"stamp": stamp(engine.device, engine.dtype), "outputs": _outputs(engine, name)}


def audit(bank: Bank, backbone: Backbone, *, device: str = "auto", precision: str = "auto") -> Iterator[Finding]:
    """Check every version of every task in a bank, one finding each."""
    for name in bank.names():
        try:
            versions = bank.versions(name)
        except AdapterbankError as error:
            yield Finding(name, False, str(error))
            continue
        if missing := _missing(bank, name):
            yield missing
        for version in versions:
            yield _check(bank, f"{name}@{version}", backbone, device, precision)


def _missing(bank: Bank, name: str) -> Finding | None:
    """Say so if the version that a task's pointer leads to is not there: no folder would tell."""
    try:
        bank.get(name)
    except (PackageDamaged, BackboneMismatch):
        return None  # it is there, and its own check says what is wrong
    except AdapterbankError as error:
        return Finding(name, False, str(error))
    return None


def _check(bank: Bank, ref: str, backbone: Backbone, device: str, precision: str) -> Finding:
    try:
        package = bank.get(ref)
        # An engine of its own for each package: the outputs must not depend on who else is resident.
        engine = Engine(backbone, device=device, precision=precision, programs=False)
        found = _outputs(engine, engine.load(package))
    except AdapterbankError as error:
        return Finding(ref, False, str(error))
    return _compare(package, found, stamp(engine.device, engine.dtype))


def _compare(package: Package, found: list[Any], now: dict[str, Any]) -> Finding:
    kept = package.manifest.fingerprint
    if not {"stamp", "outputs"} <= kept.keys() or "precision" not in kept["stamp"]:
        return Finding(package.ref, False, "the manifest has no fingerprint to compare with")
    exact = same_bits(kept["stamp"], now)
    pairs = [(np.array(a), np.array(b)) for a, b in zip(kept["outputs"], found, strict=False)]
    if len(kept["outputs"]) != len(found) or any(a.shape != b.shape for a, b in pairs):
        return Finding(package.ref, False, "the outputs on the probe texts have another shape")
    difference = float(np.max([np.abs(a - b).max() for a, b in pairs]))  # unlike max, this lets no NaN slip
    # Half the precision of a GPU's bf16 is no sign of forgetting: there the numbers carry three digits.
    tolerance = TOLERANCE if "bf16" not in (now["precision"], kept["stamp"]["precision"]) else 0.1
    ok = difference == 0.0 if exact else difference <= tolerance
    how = (
        "to the bit"
        if exact
        else f"within {tolerance:g}, as the library or the machine is not the one it was trained with"
    )
    return Finding(package.ref, ok, how if ok else f"outputs on the probe texts differ by {difference:g}", difference)


def _outputs(engine: Engine, name: str) -> list[Any]:
    resident = engine.residents[name]
    pairs = [second for _, second in PROBES] if len(resident.task.text) == 2 else None
    # Not `engine.rows`: for spans it cuts the second text alone, and refuses a probe whose first one is too long.
    tokens = engine.backbone.tokenize([first for first, _ in PROBES], pairs, resident.max_length)
    return [out.tolist() for out in engine.outputs(tokens, [name] * len(tokens))]
