"""Plans: everything that a slot adds and changes, except the numbers. A manifest's `method` is a plan as JSON.

The names of a slot's tensors (`methods.roles`) and the plan's roles decide which of them train. What trains is saved.
No code outside `methods` and this file depends on the method that a slot was trained with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NotRequired, TypedDict

from adapterbank import schema
from adapterbank.config import limited
from adapterbank.errors import ConfigError
from adapterbank.methods import ADDITIONS, LAYER, Options, addition_in, addition_name, find_method, parse_layers, roles
from adapterbank.slots.addition import Addition, Fuses, find_addition

MAX_OUTPUTS = 1_000_000
"""The most outputs of a head."""
MAX_ADDITIONS = 16
"""The most additions of a plan."""


@dataclass(frozen=True)
class Head:
    """The shape of a slot's head: pooling, dropout, an optional hidden layer, and one linear layer."""

    kind: str
    outputs: int = schema.limited(low=1, high=MAX_OUTPUTS)
    """Classes; 1 for regression; 2 (start, end) for spans."""
    pooling: str = limited("pooling", "mean")
    hidden: int = limited("head_hidden", 0)
    """Width of a hidden tanh layer, 0 for none."""
    shift: float = 0.0
    scale: float = 1.0
    """Regression: the output is the raw output times `scale` plus `shift`, the training labels' spread and mean."""
    unit: bool = False
    """Whether the pooled vector is scaled to length 1, as for heads that are fitted and not trained."""
    weighs: bool = False
    """Whether it has one more output, last, that says how much a window counts among those of its text."""

    @property
    def width(self) -> int:
        """The number of all outputs."""
        return self.outputs + self.weighs


@dataclass(frozen=True)
class Plan:
    """Everything that a slot adds and changes, except the numbers."""

    method: str
    head: Head
    additions: tuple[Addition, ...]
    """What it adds. Additions at the same site apply one after the other, in this order."""
    trains: frozenset[str]
    """The roles that train and are saved."""

    @property
    def alone(self) -> bool:
        """Whether it changes whole layers, so that its rows cannot share a batch with those of other slots."""
        return any(role == "embedding" or role.startswith("layer:") for role in self.trains)

    @property
    def only_head(self) -> bool:
        """Whether nothing but the head trains."""
        return self.trains == {"head"}

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The key of each addition in tensor names: `adapter`, and `adapter-2` for a second one of that type."""
        seen: Counter[str] = Counter()
        keys = []
        for addition in self.additions:
            seen[addition.name] += 1
            count = seen[addition.name]
            keys.append(addition.name if count == 1 else f"{addition.name}-{count}")
        return tuple(keys)

    def split(self, name: str) -> tuple[str, int, str] | None:
        """Split a tensor's name into site, index of the addition and part; None if no addition owns the tensor."""
        key = addition_in(name)
        if key is None:
            return None
        site, part = name.split(f".{key}.", 1)
        return site, self.keys.index(key), part

    @property
    def fusions(self) -> tuple[Fuses, ...]:
        """Those of its additions that fuse what it stands on."""
        return tuple(addition for addition in self.additions if isinstance(addition, Fuses))

    @property
    def fuses(self) -> bool:
        """Whether it fuses the additions of what it stands on; otherwise it stands on one slot, and acts after it."""
        return bool(self.fusions)

    def on(self, *bases: Plan) -> Plan:
        """Return the plan with what it fuses of other plans, or with the additions of one before its own."""
        below = [base.additions for base in bases]
        if self.fuses:
            fused = (one.over(below) if isinstance(one, Fuses) else one for one in self.additions)
            return replace(self, additions=tuple(fused))
        return replace(self, additions=(*(one for additions in below for one in additions), *self.additions))

    def name_on(self, bases: Sequence[Plan], name: str) -> str:
        """Return the name that one of its tensors has in `self.on(*bases)`."""
        place = self.split(name)
        if place is None or self.fuses:
            return name
        site, number, part = place
        return f"{site}.{self.on(*bases).keys[sum(len(base.additions) for base in bases) + number]}.{part}"

    def name_of(self, bases: Sequence[Plan], number: int, name: str) -> str | None:
        """Return the name that a tensor of one of the bases has in `self.on(*bases)`; None if it is not read there."""
        if "head" in roles(name):
            return None
        if not self.fuses:
            return name
        if place := bases[number].split(name):
            site, _, part = place
            for key, one in zip(self.keys, self.additions, strict=True):
                if isinstance(one, Fuses) and one.acts_at(site):
                    return f"{site}.{key}.{number}.{part}"
        return None

    @property
    def removable(self) -> tuple[Addition, ...]:
        """The additions that ablation and pruning can remove by layer."""
        return tuple(addition for addition in self.additions if addition.removable)

    @property
    def removable_layers(self) -> tuple[int, ...]:
        """The layers that have any removable addition."""
        return tuple(sorted({layer for addition in self.removable for layer in addition.acting_layers}))

    def without(self, layers: Collection[int]) -> Plan:
        """Return the plan with its removable additions removed from some layers."""
        return replace(self, additions=tuple(_without(addition, layers) for addition in self.additions))

    def removes(self, name: str, layers: Collection[int]) -> bool:
        """Return whether `without` removes a tensor for some layers."""
        place, layer = self.split(name), LAYER.match(name)
        return bool(place and layer and self.additions[place[1]].removable and int(layer[1]) in layers)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        value: dict[str, Any] = {"name": self.method, "head": asdict(self.head), **dict.fromkeys(ADDITIONS)}
        value |= {key: _to_json(addition) for key, addition in zip(self.keys, self.additions, strict=True)}
        if len(self.additions) > 1:
            value["order"] = list(self.keys)
        return value | {"trains": sorted(self.trains)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Read a plan that `to_json` wrote; raise `ValueError` for what it cannot have written."""
        if problem := schema.problem(_StoredPlan, value) or schema.unknown(Head, value["head"], "head"):
            raise ValueError(problem)
        stored = [key for key in value if addition_name(key) in ADDITIONS and value[key] is not None]
        if len(stored) > MAX_ADDITIONS:
            raise ValueError(f"it has {len(stored)} additions, and {MAX_ADDITIONS} at most are possible")
        keys = value.get("order", stored)
        if sorted(keys) != sorted(stored):
            raise ValueError(f"order {keys!r} does not match the additions {stored!r}")
        additions = tuple(_from_json(addition_name(key), value[key]) for key in keys)
        plan = cls(value["name"], Head(**value["head"]), additions, frozenset(value["trains"]))
        if plan.keys != tuple(keys):
            raise ValueError(f"additions {keys!r} are not numbered from 2")
        return plan


class _StoredPlan(TypedDict):
    """The fields of every stored plan, besides its additions."""

    name: str
    head: Head
    trains: list[str]
    order: NotRequired[list[str]]


def _without(addition: Addition, layers: Collection[int]) -> Addition:
    if not addition.removable:
        return addition
    return addition.without(layers)


_LATER = ("widths", "members")
"""Fields of additions that a plan is stored without if they are empty, as before there were any."""


def _to_json(addition: Addition) -> dict[str, Any]:
    value: dict[str, Any] = asdict(addition)  # type: ignore[call-overload]
    return {name: field for name, field in value.items() if field or name not in _LATER}


def _from_json(name: str, value: Mapping[str, Any]) -> Addition:
    if problem := schema.problem(find_addition(name), value, name) or schema.unknown(find_addition(name), value, name):
        raise ValueError(problem)
    fields = {key: tuple(field) if isinstance(field, list) else field for key, field in value.items()}
    return find_addition(name)(**fields)


def make_plan(options: Options, *, depth: int, head: Head, shared_layers: bool = False) -> Plan:
    """Turn a user's options into a plan for an encoder of `depth` layers."""
    method = find_method(options.method)
    if "top" in method.uses and not 1 <= options.top <= depth:
        raise ConfigError([f"top is {options.top}, but this backbone has {depth} layers; use 1 to {depth}."])
    layers = parse_layers(options.layers, depth) if "layers" in method.uses else tuple(range(depth))
    trains = method.trains(options, layers, depth)
    partial = len(layers) < depth and any(role.startswith(("layer_norm:", "bias:")) for role in trains)
    if shared_layers and ("top" in method.uses or partial):
        raise ConfigError(
            [
                "The layers of this backbone share one set of weights, so some of them cannot be trained without the "
                "others; use method full or lora, or adapter without train_norms."
            ]
        )
    additions = tuple(find_addition(name).from_options(options, layers) for name in method.additions)
    return Plan(options.method, head, additions, trains)


def trained(names: Iterable[str], plan: Plan) -> list[str]:
    """Return the names that train under a plan; the pooler trains only if the head reads it."""
    return [
        name
        for name in names
        if roles(name) & plan.trains and (plan.head.pooling == "pooler" or "pooler" not in roles(name))
    ]


def decays(name: str) -> bool:
    """Return whether weight decay applies to a tensor; it does not apply to LayerNorms, biases and scales."""
    key = addition_in(name)
    if key is not None and not find_addition(addition_name(key)).decays:
        return False
    return not roles(name) & {"bias", "layer_norm"} and ".norm." not in name


def first_trained_layer(names: Iterable[str], depth: int) -> int:
    """Return the lowest layer in which something trains: 0 if the embeddings train, `depth` if only the head does."""
    layers = [depth]
    for name in names:
        layer = LAYER.match(name)
        layers += [int(layer[1])] if layer else ([] if roles(name) & {"head", "pooler"} else [0])
    return min(layers)
