"""The audit: proves that a package's files and its outputs on fixed texts are unchanged. Knows no training.

When a task is added to a bank, its outputs on `PROBES` are stored with a stamp of the machine. An audit computes them
again and compares them to the bit if the stamps promise equal bits, otherwise within `TOLERANCES`. It reports which.
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
"""Fixed texts, short and long, plain and unusual. A change here would invalidate every older fingerprint."""

_LARGE = 100.0
"""Outputs up to which a tolerance is absolute; those of a regression have the scale of its labels."""
TOLERANCES = {"fp32": 1e-4, "bf16": 0.1, "int8": 0.5}
"""The largest difference of an output by the coarser precision of both sides, between machines or versions of torch.

Rounding alone is about 1e-6 in fp32. The numbers of bf16 have three digits, and those of int8 two: measured on real
tasks (docs/performance.md). A difference in precision is not a sign of forgetting.
"""


@dataclass(frozen=True)
class Finding:
    """The result of the audit for one version of a task."""

    ref: str
    ok: bool
    how: str
    """How it was compared, `to the bit` or `within 0.0001`, or what is wrong."""
    difference: float = 0.0
    """The largest difference of any output."""


def fingerprint(engine: Engine, name: str) -> dict[str, Any]:
    """Return a resident task's outputs on the probes and the stamp of this machine."""
    return {"stamp": stamp(engine.device, engine.dtype, engine.layout), "outputs": _outputs(engine, name)}


def audit(bank: Bank, backbone: Backbone, *, device: str = "auto", precision: str = "auto") -> Iterator[Finding]:
    """Check every version of every task in a bank; yield one finding for each."""
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
    for ref in bank.unfinished():
        yield Finding(ref, True, "not a task: an interrupted write left it, and `adapterbank gc` removes it")


def _missing(bank: Bank, name: str) -> Finding | None:
    """Return a finding if a task's default version is missing, which the versions alone do not show."""
    try:
        bank.get(name)
    except (PackageDamaged, BackboneMismatch):
        return None  # the version exists, and its own check reports what is wrong
    except AdapterbankError as error:
        return Finding(name, False, str(error))
    return None


def _check(bank: Bank, ref: str, backbone: Backbone, device: str, precision: str) -> Finding:
    try:
        package = bank.get(ref)
        # A separate engine for each package: the outputs must not depend on other resident tasks.
        engine = Engine(backbone, device=device, precision=precision, programs=False)
        outputs = _outputs(engine, engine.load(package))
    except AdapterbankError as error:
        return Finding(ref, False, str(error))
    return _compare(package, outputs, stamp(engine.device, engine.dtype, engine.layout))


def _compare(package: Package, outputs: list[Any], now: dict[str, Any]) -> Finding:
    stored = package.manifest.fingerprint
    if not {"stamp", "outputs"} <= stored.keys():
        return Finding(package.ref, False, "the manifest has no fingerprint to compare with")
    exact = same_bits(stored["stamp"], now)
    try:
        pairs = [(np.array(a, float), np.array(b, float)) for a, b in zip(stored["outputs"], outputs, strict=True)]
    except ValueError:  # another number of texts, or rows of different lengths
        pairs = []
    if not pairs or any(a.shape != b.shape for a, b in pairs):
        return Finding(package.ref, False, "the outputs on the probe texts have another shape")
    difference = float(np.max([np.abs(a - b).max() for a, b in pairs]))  # unlike max, this propagates NaN
    precisions = now["precision"], stored["stamp"]["precision"]
    tolerance = max(TOLERANCES.get(name, TOLERANCES["fp32"]) for name in precisions)
    largest = max(float(np.abs(a).max(initial=0.0)) for a, _ in pairs)
    tolerance *= max(1.0, largest / _LARGE)
    ok = difference == 0.0 if exact else difference <= tolerance
    how = "to the bit" if not difference else f"within {tolerance:g}, because {_reason(*precisions)}"
    return Finding(package.ref, ok, how if ok else f"outputs on the probe texts differ by {difference:g}", difference)


def _reason(now: str, stored: str) -> str:
    """Return why outputs may differ."""
    if now == stored:
        return "the library or the machine may not be the one it was trained with"
    return f"it was trained in {stored} and is computed in {now}"


def _outputs(engine: Engine, name: str) -> list[Any]:
    resident = engine.residents[name]
    pairs = [second for _, second in PROBES] if len(resident.task.text) == 2 else None
    # Not `engine.rows`: for spans it cuts only the second text, and refuses a probe whose first text is too long.
    tokens = engine.backbone.tokenize([first for first, _ in PROBES], pairs, resident.max_length)
    return [out.tolist() for out in engine.outputs(tokens, [name] * len(tokens))]
