"""Sharing rules: what slots must have in common to share a product, a training step or an inference graph.

Sizes need not match: tensors are padded with zeros to a size class, or to the widest slot of a graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from adapterbank.kinds.table import KINDS
from adapterbank.slots.addition import Addition
from adapterbank.slots.plan import Plan


def product_form(addition: Addition, site: str) -> Addition:
    """Return what two additions must share to run in one batched product: the arithmetic and the size class."""
    return addition.at(site).rounded()


def step_form(plan: Plan) -> Plan:
    """Return what runs must share to train in one captured graph: everything but the true widths of additions."""
    return replace(plan, additions=tuple(one.rounded() for one in plan.additions))


def graph_form(plan: Plan, names: Iterable[str]) -> Hashable:
    """Return what slots must share to run in one inference graph: everything but sizes, label counts and numbers."""
    head = plan.head
    additions = tuple(one.resized(1) for one in plan.additions)
    return additions, frozenset(names), KINDS[head.kind].per_token, head.pooling, head.unit, head.hidden, plan.alone
