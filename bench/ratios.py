"""What a comparison's figures say: each peer's faster precision, ratios, and the goals they have to meet. Pure Python.

Names are those of `gpu.py`: a peer's is `kind [precision]`, and all of adapterbank's begin with `OWN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OWN, EIGHT = "adapterbank", "adapterbank, 8 runs at once, a step of all"
MIXED, ONE = f"{OWN}: mixed", f"{OWN}: one"
OTHERS = f"{OWN}: others at each call"


@dataclass(frozen=True)
class Goal:
    """A bound of one ratio, for some shapes."""

    ratio: str
    bound: float
    at_least: bool = False
    """Whether the bound is the least value; otherwise it is the most."""
    shapes: tuple[str, ...] = ("base", "minilm")

    def met(self, value: float) -> bool:
        """Return whether a value is within the bound, which itself is."""
        return value >= self.bound if self.at_least else value <= self.bound


GOALS: dict[str, tuple[Goal, ...]] = {
    "training": (
        Goal("own step, ms", 4.6, shapes=("base",)),
        Goal("full, reduce-overhead / own", 1.8, at_least=True, shapes=("base",)),
        Goal("own memory / adapters DoubleSeqBn [bf16]", 0.75, shapes=("base",)),
    ),
    "inference": (
        Goal("own one / lone, reduce-overhead", 1.0),
        Goal("own others / own one", 1.05),
    ),
}


def fastest(everyone: dict[str, Any]) -> dict[str, Any]:
    """Return each peer's figures in its faster precision, which counts as its time."""
    best: dict[str, Any] = {}
    for name, result in everyone.items():
        kind = name.partition(" [")[0]
        if " [" in name and (kind not in best or result["median_ms"] < best[kind]["median_ms"]):
            best[kind] = {"who": name, **result}
    return best


def training_ratios(found: dict[str, Any]) -> dict[str, float]:
    """Compute multiples of the lower bound, times per step and per run, and memory beside each peer's precision."""
    everyone, ratios = found["contestants"], {}
    if OWN not in everyone:
        return {}
    own = everyone[OWN]
    ratios["own step, ms"] = own["median_ms"]
    ratios["own / arithmetic floor"] = own["median_ms"] / found["floor_ms"]
    for kind, peer in found["peers"].items():
        ratios[f"{kind} / own"] = peer["median_ms"] / own["median_ms"]
        if EIGHT in everyone:
            ratios[f"{kind} / own per run of eight"] = 8 * peer["median_ms"] / everyone[EIGHT]["median_ms"]
    for name, peer in everyone.items():
        if " [" in name:
            ratios[f"own memory / {name}"] = own["peak_mb"] / peer["peak_mb"]
    return ratios


def inference_ratios(found: dict[str, Any]) -> dict[str, float]:
    """Compute the cost of mixing tasks, and of one task beside a lone model, and the peers' times beside ours."""
    everyone, ratios = found["contestants"], {}
    own = {name: everyone[name]["median_ms"] for name in (MIXED, ONE, OTHERS) if name in everyone}
    for name, what in ((MIXED, "mixed"), (OTHERS, "others")):
        if name in own and ONE in own:
            ratios[f"own {what} / own one"] = own[name] / own[ONE]
    for kind, peer in found["peers"].items():
        if kind.startswith("lone"):
            if ONE in own:
                ratios[f"own one / {kind}"] = own[ONE] / peer["median_ms"]
        elif MIXED in own:
            ratios[f"{kind} / own"] = peer["median_ms"] / own[MIXED]
    return ratios


def judge(part: str, shape: str, ratios: dict[str, float]) -> list[dict[str, Any]]:
    """Return the goals of a part and a shape whose ratios were measured, and whether they are met."""
    return [
        {
            "ratio": goal.ratio,
            "goal": f"{'>=' if goal.at_least else '<='} {goal.bound:g}",
            "value": ratios[goal.ratio],
            "met": goal.met(ratios[goal.ratio]),
        }
        for goal in GOALS[part]
        if goal.ratio in ratios and shape in goal.shapes
    ]
