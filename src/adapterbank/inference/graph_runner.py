"""Batches of rows of any slots as captured graphs: the same kernels for any slots. Knows no names and no texts.

Before a graph runs, the slots of its batch are copied side by side into its *slot buffer*, one place each, so that the
graph does not depend on which slots they are. Slots of other sizes or label counts are padded with zeros on the way.
Several rows of one slot share its place if there are enough of them; a batch of one slot has a buffer of one place. The
numbers of rows and tokens are rounded up to a few values, so that few graphs are needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import PaddedBatch, Tokens, cell_numbers, padded_length
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import compiled_layer_fns, forward, fused_attention
from adapterbank.inference.graphs import GraphCompiler
from adapterbank.kinds.table import KINDS
from adapterbank.slots import heads
from adapterbank.slots.plan import Plan
from adapterbank.slots.stack import RowLayout, Slot, Stacks
from adapterbank.slots.static_routing import StaticRoute

BUFFER_BYTES = 2 << 30
"""The most bytes of all slot buffers together; the one in use may be larger."""
ROWS = 256
"""The most rows of one batch: each may need a place in the slot buffer."""
ROWS_PER_PLACE = 8
"""Rows of one slot that share a place, for fewer copies and larger products."""
_WARM_UP_ROWS = 2 * ROWS_PER_PLACE
"""Rows of the batches that `warm` runs."""
Wait = Callable[[], list[np.ndarray]]
"""Waits for launched work and returns each row's outputs; see `runner.outputs`."""


class _SlotBuffer:
    """The memory that the slots of a batch are copied into, side by side."""

    def __init__(self, layouts: Sequence[RowLayout], places: int, dtype: torch.dtype, device: torch.device) -> None:
        types = {layout: torch.float32 if layout.head else dtype for layout in layouts}
        rows = {layout: torch.zeros(places, layout.width, dtype=types[layout], device=device) for layout in layouts}
        self.own = {name: view for layout, memory in rows.items() for name, view in layout.views(memory).items()}
        self.rows = {_part(layout): (layout, memory.unbind(0)) for layout, memory in rows.items()}
        self.words = {layout: memory.view(torch.int32).unbind(0) for layout, memory in rows.items()}  # see Block
        self.slots: list[int | None] = [None] * places  # the slot in each place
        self.bytes = sum(memory.numel() * memory.element_size() for memory in rows.values())
        self.graphs: dict[_Shape, _Graph] = {}


@dataclass
class _HostBuffer:
    """The memory of the host for the inputs and outputs of one launch."""

    inputs: Tensor  # [B * (2 L + 1)] ids, types and lengths
    array: np.ndarray  # the same memory
    outputs: Tensor | None = None


@dataclass
class _Graph:
    """The graph for one shape of batch, with its inputs and outputs on the device."""

    inputs: Tensor  # as `_HostBuffer.inputs`
    outputs: Tensor | None = None
    run: Callable[[], None] | None = None
    idle: list[_HostBuffer] = field(default_factory=list)  # those of finished launches


@dataclass(frozen=True)
class _Shape:
    """What a graph is captured for."""

    family: int | None
    layouts: tuple[RowLayout, ...]
    places: int
    """Places for slots, each with an equal share of the rows; 0 for the bare encoder."""
    rows: int
    longest: int


class GraphRunner:
    """All graphs of one encoder and its stacks."""

    def __init__(self, config: EncoderConfig, stacks: Stacks, compiler: GraphCompiler) -> None:
        """Create a runner; it compiles and captures on demand."""
        self._config, self._stacks, self._compiler = config, stacks, compiler
        self._layer_fns = compiled_layer_fns(compiler.compiled)
        self._on_gpu = stacks.device.type == "cuda"
        self._fused = fused_attention(config, stacks.device)
        self.buffers: OrderedDict[tuple[tuple[RowLayout, ...], int], _SlotBuffer] = OrderedDict()
        self._index_maps: dict[tuple[RowLayout, RowLayout], Tensor] = {}

    def padded_length(self, length: int) -> int:
        """Return the length that the rows of a batch are padded to if this is its longest."""
        return padded_length(length, self._config.max_length)

    def warm(self) -> None:
        """Run batches of every form for the resident slots, so that no request waits for the compiler."""
        row = Tokens(np.zeros(1, np.int64), np.zeros(1, np.int64))
        families = {self._stacks.slot(slot).family: slot for slot in self._stacks.numbers}
        for slot in families.values():
            if self._stacks.plan(slot).alone:
                continue
            for places in (1, _WARM_UP_ROWS // ROWS_PER_PLACE, _WARM_UP_ROWS):
                self.launch([row] * _WARM_UP_ROWS, [slot] * _WARM_UP_ROWS, places)()

    def launch(self, tokens: Sequence[Tokens], slots: Sequence[int | None], places: int | None = None) -> Wait:
        """Launch rows whose slots are of one family; return a function that waits for the head outputs.

        Further batches can be launched before that, and the device runs them in order. `places` is the number of places
        in the slot buffer, by default as few as suffice.
        """
        counts = Counter(slots)
        used: dict[int | None, Slot] = {slot: self._stacks.slot(slot) for slot in counts if slot is not None}
        first = next(iter(used.values()), None)
        rows = 1 << (len(tokens) - 1).bit_length()
        sizes = np.array([len(row.ids) for row in tokens])
        layouts = _widest(list(used.values()))
        places = (places or _places(counts, rows)) if layouts else 0
        shape = _Shape(first.family if first else None, layouts, places, rows, self.padded_length(int(sizes.max())))
        buffer = self._buffer(layouts, places)
        # The device copies slots while the host lays out the tokens.
        positions = np.array(self._assign_rows(buffer, slots, counts, rows))
        graph = buffer.graphs.get(shape) or self._graph(buffer, shape)
        host = graph.idle.pop() if graph.idle else self._host_buffer(graph)
        _write(host.array, tokens, sizes, positions, shape)
        graph.inputs.copy_(host.inputs, non_blocking=True)
        if graph.run is None:
            plan = first.plan if first else None
            graph.run = self._compiler.capture(lambda: self._body(graph, buffer, plan, shape))
        graph.run()
        wait_for_outputs = self._copy_outputs(graph, host)

        def wait() -> list[np.ndarray]:
            out = wait_for_outputs()[positions]
            graph.idle.append(host)
            return _split(out, sizes, slots, used)

        return wait

    def _copy_outputs(self, graph: _Graph, host: _HostBuffer) -> Callable[[], np.ndarray]:
        """Start the copy of the outputs to the host; return a function that waits for it."""
        assert graph.outputs is not None
        if host.outputs is None:
            host.outputs = self._on_host(torch.zeros_like(graph.outputs, device="cpu"))
        host.outputs.copy_(graph.outputs, non_blocking=True)
        done = torch.cuda.Event() if self._on_gpu else None
        if done:
            done.record(torch.cuda.current_stream(self._stacks.device))
        outputs = host.outputs.numpy()

        def wait() -> np.ndarray:
            if done:
                done.synchronize()
            return outputs

        return wait

    def _buffer(self, layouts: tuple[RowLayout, ...], places: int) -> _SlotBuffer:
        """Return the slot buffer for some layouts; evict the least recently used, with their graphs, if too large."""
        key = (layouts, places)
        if key not in self.buffers:
            self.buffers[key] = _SlotBuffer(layouts, places, self._stacks.dtype, self._stacks.device)
        self.buffers.move_to_end(key)
        while len(self.buffers) > 1 and sum(buffer.bytes for buffer in self.buffers.values()) > BUFFER_BYTES:
            if self._on_gpu:
                torch.cuda.synchronize(self._stacks.device)  # one of its graphs may still run
            self.buffers.popitem(last=False)
        return self.buffers[key]

    def _graph(self, buffer: _SlotBuffer, shape: _Shape) -> _Graph:
        size = shape.rows * (2 * shape.longest + 1)
        return buffer.graphs.setdefault(shape, _Graph(torch.zeros(size, dtype=torch.int64, device=self._stacks.device)))

    def _host_buffer(self, graph: _Graph) -> _HostBuffer:
        inputs = self._on_host(torch.zeros_like(graph.inputs, device="cpu"))
        return _HostBuffer(inputs, inputs.numpy())

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return host memory that a GPU can access asynchronously."""
        return tensor.pin_memory() if self._on_gpu else tensor

    def _assign_rows(
        self, buffer: _SlotBuffer, slots: Sequence[int | None], counts: Counter[int | None], rows: int
    ) -> list[int]:
        """Return each row's position in the batch, in a place with its slot; copy slots that are not in the buffer."""
        if len(buffer.slots) <= 1:  # one slot for all rows, or none
            self._copy(buffer, [(0, number) for number in slots[: len(buffer.slots)] if number is not None])
            return list(range(len(slots)))
        share = rows // len(buffer.slots)
        wanted = [number for number, count in counts.items() for _ in range(-(-count // share))]
        present: dict[int | None, list[int]] = {}
        for place, number in enumerate(buffer.slots):
            present.setdefault(number, []).append(place)
        places = [present[number].pop() if present.get(number) else -1 for number in wanted]
        free = iter(sorted(set(range(len(buffer.slots))).difference(places)))
        places = [place if place >= 0 else next(free) for place in places]
        self._copy(buffer, [(place, n) for place, n in zip(places, wanted, strict=True) if n is not None])
        positions: dict[int | None, list[int]] = {}
        for place, number in zip(places, wanted, strict=True):
            positions.setdefault(number, []).extend(range(place * share, (place + 1) * share))
        unassigned = {number: iter(own) for number, own in positions.items()}
        return [next(unassigned[number]) for number in slots]

    def _copy(self, buffer: _SlotBuffer, wanted: Sequence[tuple[int, int]]) -> None:
        """Copy slots (place, slot) into the buffer, unless they are there already."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for place, number in wanted:
            if buffer.slots[place] == number:
                continue
            buffer.slots[place] = None  # until the copy is complete: it may fail for lack of memory
            for block, row in self._stacks.slot(number).rows:
                layout, into = buffer.rows[_part(block.layout)]
                if layout is block.layout:
                    targets.append(buffer.words[layout][place])
                    sources.append(block.words[row])
                else:
                    torch.index_select(block.each[row], 0, self._index_map(block.layout, layout), out=into[place])
        if targets:
            torch._foreach_copy_(targets, sources)
        for place, number in wanted:
            buffer.slots[place] = number

    def _index_map(self, narrow: RowLayout, wide: RowLayout) -> Tensor:
        """Return the index in a narrow row of each number of a wide row; a narrow row's last number is always 0."""
        if (narrow, wide) not in self._index_maps:
            index = torch.full((wide.width,), narrow.width - 1)
            for name, (start, end) in wide.ranges.items():
                first, last = narrow.ranges[name]
                numbers = torch.arange(first, last).view(narrow.shapes[name])
                index[start:end].view(wide.shapes[name])[tuple(slice(n) for n in numbers.shape)] = numbers
            self._index_maps[narrow, wide] = index.to(self._stacks.device)
        return self._index_maps[narrow, wide]

    @torch.inference_mode()
    def _body(self, graph: _Graph, buffer: _SlotBuffer, plan: Plan | None, shape: _Shape) -> None:
        """Run the batch on the tensors that `launch` has filled."""
        # Each task's own scale is applied to the outputs later (`_split`).
        head = replace(plan.head, shift=0.0, scale=1.0) if plan else heads.BARE
        cells = shape.rows * shape.longest
        ids, types = graph.inputs[: 2 * cells].view(2, -1).unbind(0)
        batch = PaddedBatch.of(ids, types, graph.inputs[2 * cells :], self._fused)
        route = StaticRoute(self._stacks.frozen, buffer.own, plan)
        hidden = forward(self._config, route, batch, layer_fns=self._layer_fns)
        x = heads.reads(hidden, batch, head, route.linear)
        if plan:
            x = heads.apply(x.view(shape.places, -1, x.shape[-1]).squeeze(0), head, route.own)
        per_token = KINDS[head.kind].per_token
        x = x.float().view(shape.rows, shape.longest, -1) if per_token else x.float().view(shape.rows, -1)
        if graph.outputs is None:
            graph.outputs = torch.empty_like(x)
        graph.outputs.copy_(x)


def _write(into: np.ndarray, tokens: Sequence[Tokens], sizes: np.ndarray, positions: np.ndarray, shape: _Shape) -> None:
    """Write ids, then types, then lengths of padded rows; positions without a row have one token."""
    cells = shape.rows * shape.longest
    into[: 2 * cells] = 0
    into[2 * cells :] = 1
    where = cell_numbers(sizes, positions * shape.longest)
    into[where] = np.concatenate([row.ids for row in tokens])
    into[cells + where] = np.concatenate([row.types for row in tokens])
    into[2 * cells + positions] = sizes


def _places(counts: Counter[int | None], rows: int) -> int:
    """Return the number of places for a padded batch of `rows`: shared by rows of one slot if they all fit so."""
    if len(counts) == 1:
        return 1
    shared = sum(-(-count // ROWS_PER_PLACE) for count in counts.values())
    return rows // ROWS_PER_PLACE if shared * ROWS_PER_PLACE <= rows else rows


def _part(layout: RowLayout) -> tuple[bool, bool]:
    return layout.head, layout.decays


def _widest(slots: Sequence[Slot]) -> tuple[RowLayout, ...]:
    """Return the layouts that fit every slot of a family: the widest of each part."""
    widest: dict[tuple[bool, bool], RowLayout] = {}
    for layouts in {slot.layouts for slot in slots}:
        for layout in layouts:
            if layout.numbers > getattr(widest.get(_part(layout)), "numbers", 0):
                widest[_part(layout)] = layout
    return tuple(widest[part] for part in sorted(widest))


def _split(
    out: np.ndarray, sizes: np.ndarray, slots: Sequence[int | None], used: Mapping[int | None, Slot]
) -> list[np.ndarray]:
    """Return each row's part of the outputs, on its task's own scale."""
    if not used:
        return list(out)
    slot_heads = {number: slot.plan.head for number, slot in used.items()}
    widths = {slot: head.width for slot, head in slot_heads.items()}
    if KINDS[next(iter(slot_heads.values())).kind].per_token:  # the same for the whole family
        parts = zip(out, sizes.tolist(), slots, strict=True)
        return [row[:size, : widths[slot]] for row, size, slot in parts]
    outputs = [row[: widths[slot]] for row, slot in zip(out, slots, strict=True)]
    if scaled := {slot for slot, head in slot_heads.items() if KINDS[head.kind].standardize}:
        for i, slot in enumerate(slots):
            if slot in scaled:
                head, numbers = slot_heads[slot], outputs[i][: slot_heads[slot].outputs]
                numbers = numbers * np.float32(head.scale) + np.float32(head.shift)
                outputs[i] = np.concatenate([numbers, outputs[i][head.outputs :]])
    return outputs
