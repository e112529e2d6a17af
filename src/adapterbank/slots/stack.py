"""Slots, stacked: put in, take out, choose by row. The only place that knows a batch may hold rows of several slots.

Each tensor that a slot brings lies in a *stack* of all slots' tensors of that name and shape. Adapters are stacked by
power-of-two size class, so that one wide task does not pad a thousand narrow ones; the padding is zeros and stays so.
`Route` is a batch's view of the stacks: it answers the encoder's look-ups (`encoder.forward.Slots`), each row with its
own slot's tensors where the slot has them and with the frozen ones where it has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterbank.encoder.forward import PROJECTIONS, Frozen
from adapterbank.methods import Plan, roles
from adapterbank.slots.bottleneck import bottleneck, parts, site_names

Key = tuple[str, tuple[int, ...]]
"""A stack: tensor name and (padded) shape."""


@dataclass(frozen=True)
class Segment:
    """Adjacent rows of a batch that go through one slot; None is the bare backbone."""

    slot: int | None
    rows: int
    tokens: int


@dataclass
class _Stack:
    tensor: Tensor  # [capacity, *shape]
    owners: list[int | None]  # the slot of each entry, None where it is free


@dataclass(frozen=True)
class _Slot:
    plan: Plan
    places: dict[str, tuple[Key, int]]  # tensor name -> its stack and entry
    shapes: dict[str, tuple[int, ...]]  # true shapes, before padding
    sites: frozenset[str]


class Stacks:
    """All resident slots over one set of frozen tensors."""

    def __init__(self, frozen: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> None:
        """Take the frozen tensors in the type the pass computes in; `dtype` is what slots are kept in."""
        self.frozen, self.dtype = frozen, dtype
        self._stacks: dict[Key, _Stack] = {}
        self._slots: dict[int, _Slot] = {}
        self._next = 0

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.frozen.values())).device

    def __len__(self) -> int:
        """Count the resident slots."""
        return len(self._slots)

    def plan(self, slot: int) -> Plan:
        """Give the plan a slot was put in with."""
        return self._slots[slot].plan

    def put(self, plan: Plan, tensors: Mapping[str, Tensor]) -> int:
        """Copy a slot's tensors in and give its number."""
        slot, self._next = self._next, self._next + 1
        places: dict[str, tuple[Key, int]] = {}
        for name, tensor in tensors.items():
            key = (name, _padded(name, tuple(tensor.shape), plan))
            places[name] = (key, self._enter(key, slot, tensor))
        sites = frozenset(site_names(plan.adapter)) if plan.adapter else frozenset()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._slots[slot] = _Slot(plan, places, shapes, sites)
        return slot

    def take(self, slot: int, of: Mapping[Key, Tensor] | None = None) -> dict[str, Tensor]:
        """Copy a slot's tensors out, at their true sizes; `of` are other tensors stacked alike (an optimiser's)."""
        held = self._slots[slot]
        return {name: self._view(held, name, of).detach().float().cpu().clone() for name in held.places}

    def write(self, slot: int, tensors: Mapping[str, Tensor], into: Mapping[Key, Tensor] | None = None) -> None:
        """Overwrite a resident slot's tensors in place; `into` as `of` in `take`."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._view(self._slots[slot], name, into).copy_(tensor)

    def remove(self, slot: int) -> None:
        """Free a slot's entries for the next one."""
        for key, entry in self._slots.pop(slot).places.values():
            self._stacks[key].owners[entry] = None

    def trainable(self) -> dict[Key, Tensor]:
        """Give every stack as a leaf that takes gradients; call again after each `put`."""
        for stack in self._stacks.values():
            if not stack.tensor.requires_grad:
                stack.tensor = stack.tensor[: len(stack.owners)].clone().requires_grad_()
        return {key: stack.tensor for key, stack in self._stacks.items()}

    def owners(self, key: Key) -> list[int | None]:
        """Say which slot each entry of a stack belongs to."""
        return self._stacks[key].owners

    def route(self, segments: Sequence[Segment], *, compute: torch.dtype | None = None) -> Route:
        """Give a batch's view of the stacks; its rows must stand in the order of the segments."""
        return Route(self, segments, compute or self.dtype)

    def _view(self, held: _Slot, name: str, of: Mapping[Key, Tensor] | None = None) -> Tensor:
        key, entry = held.places[name]
        stack = self._stacks[key].tensor if of is None else of[key]
        return stack[entry][tuple(slice(n) for n in held.shapes[name])]

    def _enter(self, key: Key, slot: int, tensor: Tensor) -> int:
        """Copy a tensor into a free entry of its stack; a full stack doubles, so a put costs the same at any number."""
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = _Stack(torch.zeros(1, *key[1], dtype=self.dtype, device=self.device), [])
        if None in stack.owners:
            entry = stack.owners.index(None)
        else:
            entry = len(stack.owners)
            stack.owners.append(None)
        with torch.no_grad():
            if entry >= len(stack.tensor):
                stack.tensor = torch.cat([stack.tensor, torch.zeros_like(stack.tensor)])
            stack.tensor[entry].zero_()
            stack.tensor[entry][tuple(slice(n) for n in tensor.shape)] = tensor.to(self.device, self.dtype)
        stack.owners[entry] = slot
        return entry


class Route:
    """One batch's choice of tensors: what `encoder.forward.Slots` asks for, on the level of tokens or of rows."""

    def __init__(self, stacks: Stacks, segments: Sequence[Segment], compute: torch.dtype) -> None:
        """See `Stacks.route`."""
        self._stacks, self.segments, self._compute = stacks, list(segments), compute
        self._held = [stacks._slots[s.slot] if s.slot is not None else None for s in segments]
        self._touched = frozenset().union(*(held.places for held in self._held if held))
        self._sites = frozenset().union(*(held.sites for held in self._held if held))
        self._entries: dict[Key, Sequence[Tensor]] = {}
        self._sizes = [s.tokens for s in segments]

    def rows(self) -> Route:
        """Give the same choice for one vector a row instead of one a token."""
        other = Route(self._stacks, self.segments, self._compute)
        other._entries, other._sizes = self._entries, [s.rows for s in self.segments]
        return other

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._by_slot(F.linear, [x], (f"{name}.weight", f"{name}.bias"))

    def attention(self, x: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        if self._touched.isdisjoint(f"{name}.{part}.{leaf}" for part in PROJECTIONS for leaf in ("weight", "bias")):
            return Frozen(self._stacks.frozen).attention(x, name)
        return torch.cat([self.linear(x, f"{name}.{part}") for part in PROJECTIONS], -1)

    def norm(self, x: Tensor, name: str, epsilon: float) -> Tensor:
        """See `encoder.forward.Slots`."""

        def normalise(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], gain, bias, epsilon)

        return self._by_slot(normalise, [x], (f"{name}.weight", f"{name}.bias"))

    def embed(self, ids: Tensor, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        return self._by_slot(F.embedding, [ids], (f"{name}.weight",))

    def table(self, name: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        found = {id(tensor): tensor for held in self._held for tensor in [self.tensor(held, f"{name}.weight")]}
        if len(found) != 1:
            raise ValueError(f"rows with different tables {name!r} stand in one batch")
        return next(iter(found.values()))

    def add(self, y: Tensor, x: Tensor, site: str) -> Tensor:
        """See `encoder.forward.Slots`."""
        if site not in self._sites:
            return y

        def adapt(held: _Slot | None, y: Tensor, x: Tensor) -> Tensor:
            if held is None or site not in held.sites:
                return y
            adapter = held.plan.adapter
            assert adapter is not None  # it has sites
            return bottleneck(y, x, adapter, {p: self.tensor(held, f"{site}.adapter.{p}") for p in parts(adapter)})

        return self._each(adapt, [y, x])

    def tensor(self, held: _Slot | None, name: str) -> Tensor:
        """Give one slot's tensor of a name, padded, or the frozen one."""
        if held is None or name not in held.places:
            return self._stacks.frozen[name]
        key, entry = held.places[name]
        if key not in self._entries:
            stack = self._stacks._stacks[key].tensor
            whole = stack if stack.dtype == self._compute else stack.to(self._compute)
            # unbind's backward is one stack of all entries; indexing's would be a zero-filled whole per entry.
            self._entries[key] = whole.unbind(0) if whole.requires_grad and len(whole) > 1 else _Entries(whole)
        return self._entries[key][entry]

    def heads(self) -> list[tuple[Plan, dict[str, Tensor]] | None]:
        """Give each segment's plan and head tensors."""
        return [
            (held.plan, {n: self.tensor(held, n) for n in held.places if "head" in roles(n)}) if held else None
            for held in self._held
        ]

    def _by_slot(self, f: Callable[..., Tensor], xs: Sequence[Tensor], names: Sequence[str]) -> Tensor:
        if self._touched.isdisjoint(names):
            return f(*xs, *(self._stacks.frozen[name] for name in names))
        return self._each(lambda held, *xs: f(*xs, *(self.tensor(held, name) for name in names)), xs)

    def _each(self, f: Callable[..., Tensor], xs: Sequence[Tensor]) -> Tensor:
        """Apply `f(slot, *parts)` to each segment's part of `xs` and put the results end to end."""
        if len(self._held) == 1:
            return f(self._held[0], *xs)
        split = zip(*(x.split(self._sizes) for x in xs), strict=True)
        return torch.cat([f(held, *part) for held, part in zip(self._held, split, strict=True)])


class _Entries(Sequence[Tensor]):
    """A stack's entries, viewed when asked for."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, entry: int) -> Tensor:  # type: ignore[override]
        # A stack of one is reshaped: the backward of an index would copy the whole gradient once more.
        return self._whole.squeeze(0) if len(self._whole) == 1 else self._whole[entry]


def _padded(name: str, shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Widen an adapter tensor's bottleneck dimensions to its size class, the next power of two."""
    if plan.adapter is None or ".adapter." not in name or ".adapter.norm." in name:
        return shape
    wide = 1 << (plan.adapter.size - 1).bit_length()
    if ".up." in name:
        return (shape[0], wide) if len(shape) == 2 else shape
    return (wide, shape[1] if ".down." in name else wide) if len(shape) == 2 else (wide,)
