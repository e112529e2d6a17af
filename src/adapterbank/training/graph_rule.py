"""When steps run as graphs: by the clock, once more time can be saved than it costs. Knows no kernels."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class GraphRule:
    """What a graph costs and saves, and how many steps are measured before that is judged."""

    measured: int = 4
    """Eager steps; the first of them also waits for libraries, which the median leaves out."""
    kernels: float = 2.0
    """Seconds that eager steps lose while the kernels are compiled beside them."""
    compiler: float = 30.0
    """Seconds for which everything waits for torch's compiler, where the kernels do not cover the runs."""
    saved: float = 0.8
    """Share of an eager step's time that a graph saves."""
    waits: bool = False
    """Whether steps wait for their kernels instead of running eagerly meanwhile."""


BY_THE_CLOCK = GraphRule()
ALWAYS = GraphRule(measured=0, kernels=0.0, compiler=0.0, waits=True)
"""All steps run as graphs, whatever that costs."""
NEVER = GraphRule(measured=sys.maxsize)
"""No step runs as a graph."""


@dataclass
class StepClock:
    """The seconds of eager steps, and what follows from them."""

    rule: GraphRule
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> tuple[int, float]:
        """Return how many steps were eager, and their median time."""
        return len(self.seconds), median(self.seconds)

    def worth_a_graph(self, left: int, *, kernels: bool) -> bool:
        """Return whether graphs would save more time in the steps that are left than they cost."""
        if len(self.seconds) < self.rule.measured:
            return False
        saved = left * self.rule.saved * median(self.seconds or [0.0])
        return saved >= (self.rule.kernels if kernels else self.rule.compiler)
