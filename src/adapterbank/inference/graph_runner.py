"""Batches of rows of any slots as captured graphs: the same kernels for any slots. Knows no names and no texts.

A batch sends its tokens, where each of its slots has its numbers, and which of these slots each row uses (`in_place`).
So one graph serves all slots of a family, whether a batch has one of them or as many as rows. The numbers of rows and
tokens are rounded up to a few values, so that few graphs are needed; a batch of a new shape runs its kernels one by
one, and is captured when its shape recurs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from adapterbank.encoder.batch import PaddedBatch, Tokens, padded_length
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import forward, fused_attention
from adapterbank.encoder.kernels import Kernels, find_kernels
from adapterbank.encoder.kernels.launch import CompilerError, compiling
from adapterbank.errors import SlowerWarning
from adapterbank.inference.graphs import GraphCompiler, runs_graphs
from adapterbank.kinds.table import KINDS
from adapterbank.slots import heads
from adapterbank.slots.in_place import InPlaceRoute, TableColumns, Widths
from adapterbank.slots.plan import Head
from adapterbank.slots.stack import Slot, Stacks

ROWS = 256
"""The most rows of one batch."""
_WARM_UP_ROWS, _WARM_UP_LENGTHS = 16, (1, 64)
"""Rows of the batches that `warm` runs, and their tokens."""
USES_WORTH_A_GRAPH = 2
"""Batches of one shape after which it is captured, which takes about as long as some ten batches."""
Wait = Callable[[], list[np.ndarray]]
"""Waits for launched work and returns each row's outputs; see `runner.outputs`."""


@dataclass
class _HostBuffer:
    """The memory of the host for the inputs and outputs of one launch."""

    inputs: Tensor  # see `_Layout`
    parts: Sequence[np.ndarray]  # the same memory
    outputs: Tensor | None = None


@dataclass
class _Graph:
    """The graph for one shape of batch, with its inputs and outputs on the device."""

    inputs: Tensor  # as `_HostBuffer.inputs`
    outputs: Tensor | None = None
    run: Callable[[], None] | None = None
    uses: int = 0
    idle: list[_HostBuffer] = field(default_factory=list)  # those of finished launches


@dataclass(frozen=True)
class _Shape:
    """What a graph is captured for."""

    family: int | None
    widths: Widths
    rows: int
    longest: int


@dataclass(frozen=True)
class _Known:
    """What batches need of a slot."""

    slot: Slot | None
    columns: TableColumns
    line: np.ndarray
    """Its line of the table."""
    widths: int
    """The number of its `Widths`."""


class _Layout:
    """Where the inputs of a batch are: ids and types of all cells, lengths, lines, and the table of its slots."""

    def __init__(self, shape: _Shape, columns: int) -> None:
        cells, self.rows, self.columns = shape.rows * shape.longest, shape.rows, columns
        self.parts = (cells, cells, shape.rows, shape.rows, shape.rows * columns)

    def split(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return ids, types, lengths, each row's line of the table, and the table."""
        *rest, table = inputs.split(self.parts)
        return *rest, table.view(self.rows, self.columns)


class GraphRunner:
    """All graphs of one encoder and its stacks."""

    def __init__(self, config: EncoderConfig, stacks: Stacks, compiler: GraphCompiler, kernels: Kernels) -> None:
        """Create a runner; it captures on demand."""
        self._config, self._stacks, self._compiler, self._kernels = config, stacks, compiler, kernels
        self._on_gpu = stacks.device.type == "cuda"
        self._fused = fused_attention(config, stacks.device)
        self.graphs: dict[_Shape, _Graph] = {}
        self._columns: dict[int | None, TableColumns] = {}
        self._known: dict[int | None, _Known] = {}
        self._widths: dict[Widths, int] = {}
        self._joined: dict[frozenset[int], Widths] = {}
        self._moves = 0
        self._compilation, self._tracing, self._works = compiler.kernels, False, True

    def covers(self, slot: int | None) -> bool:
        """Return whether rows of a slot can run here."""
        return self._works and (slot is None or self._stacks.slot(slot).in_place)

    def padded_length(self, length: int) -> int:
        """Return the length that the rows of a batch are padded to if this is its longest."""
        return padded_length(length, self._config.max_length)

    def warm(self) -> None:
        """Compile and run batches of every form for the resident slots, so that no request waits for a kernel."""
        batches = list(self._forms())
        self._tracing = True
        try:
            with compiling(self._compilation):
                for batch in batches:
                    self.launch(*batch)()
        finally:
            self._tracing = False
        with contextlib.suppress(CompilerError):  # which has been told
            self._wait_for_kernels()
            for batch in batches * (USES_WORTH_A_GRAPH + 1):
                self.launch(*batch)()

    def _forms(self) -> Iterator[tuple[list[Tokens], list[int | None]]]:
        """Yield batches for which every kernel is compiled that rows of the resident slots may need.

        Kernels differ by whether a row fits into the smallest block of attention, by the widest slot of a batch, and by
        whether all are as wide.
        """
        by_family: dict[int, dict[Widths, int]] = {}
        for number in self._stacks.numbers:
            if self.covers(number):
                slot = self._stacks.slot(number)
                by_family.setdefault(slot.family, {}).setdefault(Widths.of([slot]), number)
        for length in sorted({min(length, self._config.max_length) for length in _WARM_UP_LENGTHS}):
            rows = [Tokens(np.zeros(length, np.int64), np.zeros(length, np.int64))] * _WARM_UP_ROWS
            yield rows, [None] * _WARM_UP_ROWS
            for found in by_family.values():
                first = next(iter(found.values()))
                for number in found.values():
                    yield rows, [number] * _WARM_UP_ROWS
                    if number != first:
                        yield rows, [number, first] * (_WARM_UP_ROWS // 2)

    def launch(self, tokens: Sequence[Tokens], slots: Sequence[int | None]) -> Wait:
        """Launch rows whose slots are of one family; return a function that waits for the head outputs.

        Further batches can be launched before that, and the device runs them in order. If a kernel does not compile,
        that is raised, and from then on no slot is covered.
        """
        self._forget_moved()
        lines = {slot: line for line, slot in enumerate(dict.fromkeys(slots))}
        used = [self._known.get(slot) or self._look_up(slot) for slot in lines]
        columns, first = used[0].columns, used[0].slot
        sizes = np.array([len(row.ids) for row in tokens])
        shape = _Shape(
            first.family if first else None,
            self._join(frozenset(one.widths for one in used)),
            1 << (len(tokens) - 1).bit_length(),
            self.padded_length(int(sizes.max())),
        )
        layout = _Layout(shape, len(columns))
        graph = self.graphs.get(shape) or self._graph(shape, layout)
        host = graph.idle.pop() if graph.idle else self._host_buffer(graph, layout)
        parts = host.parts
        _write(parts, tokens, sizes, shape)
        parts[3][: len(slots)] = [lines[slot] for slot in slots]
        np.concatenate([one.line for one in used], out=parts[4][: len(used) * len(columns)])
        graph.inputs.copy_(host.inputs, non_blocking=True)
        self._run(graph, lambda: self._body(graph, columns, shape, layout))
        wait_for_outputs = self._copy_outputs(graph, host)
        # From here on a GPU computes.
        heads_of = {one: known.slot.plan.head for one, known in zip(lines, used, strict=True) if known.slot}
        split = _splitter(sizes, [heads_of[slot] for slot in slots if slot is not None], shape.widths.outputs)

        def wait() -> list[np.ndarray]:
            out = wait_for_outputs()[: len(tokens)].copy()
            graph.idle.append(host)
            return split(out)

        return wait

    def _run(self, graph: _Graph, body: Callable[[], None]) -> None:
        """Run a batch; compile its kernels if its shape is new, and capture it once its shape recurs."""
        if self._tracing:
            body()
            return
        if not graph.uses:
            with compiling(self._compilation):
                body()
            self._wait_for_kernels()
        graph.uses += 1
        if graph.run is None and graph.uses > USES_WORTH_A_GRAPH:
            graph.run = self._compiler.capture(body, warm=False)
        (graph.run or body)()

    def _wait_for_kernels(self) -> None:
        """Wait until everything is compiled. The first failure is told; from then on nothing is covered."""
        try:
            self._compilation.wait()
        except CompilerError as error:
            self._works = False
            warnings.warn(f"Tasks run slower, without their own kernels ({error}).", SlowerWarning, 2)
            raise

    def _forget_moved(self) -> None:
        """Forget what is known of slots once a block has moved, or many slots have left."""
        if self._moves != self._stacks.moves or len(self._known) > 2 * len(self._stacks) + 2:
            self._known, self._moves = {}, self._stacks.moves

    def _look_up(self, number: int | None) -> _Known:
        """Look up what batches need of a slot."""
        slot = None if number is None else self._stacks.slot(number)
        family = slot.family if slot else None
        if family not in self._columns:
            self._columns[family] = TableColumns(self._stacks, slot)
        columns, widths = self._columns[family], Widths.of([slot]) if slot else Widths()
        found = _Known(slot, columns, columns.line(slot), self._widths.setdefault(widths, len(self._widths)))
        return self._known.setdefault(number, found)

    def _join(self, numbers: frozenset[int]) -> Widths:
        """Return the widths of a batch of slots whose own widths have these numbers."""
        if numbers not in self._joined:
            self._joined[numbers] = Widths.joined([own for own, number in self._widths.items() if number in numbers])
        return self._joined[numbers]

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

    def _graph(self, shape: _Shape, layout: _Layout) -> _Graph:
        inputs = torch.zeros(sum(layout.parts), dtype=torch.int64, device=self._stacks.device)
        return self.graphs.setdefault(shape, _Graph(inputs))

    def _host_buffer(self, graph: _Graph, layout: _Layout) -> _HostBuffer:
        inputs = self._on_host(torch.zeros_like(graph.inputs, device="cpu"))
        return _HostBuffer(inputs, np.split(inputs.numpy(), np.cumsum(layout.parts)[:-1]))

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return host memory that a GPU can access asynchronously."""
        return tensor.pin_memory() if self._on_gpu else tensor

    @torch.inference_mode()
    def _body(self, graph: _Graph, columns: TableColumns, shape: _Shape, layout: _Layout) -> None:
        """Run the batch on the tensors that `launch` has filled."""
        # Each task's own scale is applied to the outputs later (`_split`).
        head = columns.plan.head if columns.plan else heads.BARE
        ids, types, lengths, rows, table = layout.split(graph.inputs)
        batch = PaddedBatch.of(ids, types, lengths, self._fused)
        route = InPlaceRoute(self._stacks.frozen, columns, self._kernels, shape.widths, table, rows)
        x = heads.reads(forward(self._config, route, batch), batch, head, route.linear)
        x = heads.raw(x, head, route.project) if columns.plan else x.float()
        x = x.view(shape.rows, shape.longest, -1) if KINDS[head.kind].per_token else x.view(shape.rows, -1)
        if graph.outputs is None:
            graph.outputs = torch.empty_like(x)
        graph.outputs.copy_(x)


def make_graph_runner(config: EncoderConfig, stacks: Stacks) -> GraphRunner | None:
    """Return a runner for the device of some stacks; None where there are no graphs or no kernels."""
    kernels = find_kernels(stacks.device)
    if kernels is None or not runs_graphs(stacks.device):
        return None
    return GraphRunner(config, stacks, GraphCompiler(stacks.device), kernels)


def _write(into: Sequence[np.ndarray], tokens: Sequence[Tokens], sizes: np.ndarray, shape: _Shape) -> None:
    """Write ids, types and lengths of padded rows; positions without a row have one token."""
    ids, types, lengths, lines, _ = into
    lengths[:], lines[:] = 1, 0
    lengths[: len(sizes)] = sizes
    rows = (ids, [row.ids for row in tokens]), (types, [row.types for row in tokens])
    if len(sizes) == shape.rows and (sizes == shape.longest).all():
        for part, given in rows:
            np.concatenate(given, out=part)
        return
    real = (np.arange(shape.longest) < sizes[:, None]).ravel()
    for part, given in rows:
        part[:] = 0
        part[: len(real)][real] = np.concatenate(given)


def _splitter(sizes: np.ndarray, row_heads: Sequence[Head], outputs: int) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Return what splits outputs into those of each row, on its task's own scale; there are no heads without tasks."""
    if not row_heads:
        return list
    if KINDS[row_heads[0].kind].per_token:  # the same for the whole family
        return lambda out: [
            row[:size, : head.width] for row, size, head in zip(out, sizes.tolist(), row_heads, strict=True)
        ]
    scaled = [i for i, head in enumerate(row_heads) if KINDS[head.kind].standardize]
    widths = [head.width for head in row_heads]
    same = set(widths) == {outputs}

    def split(out: np.ndarray) -> list[np.ndarray]:
        rows = list(out) if same else [row[:width] for row, width in zip(out, widths, strict=True)]
        for i in scaled:
            head = row_heads[i]
            numbers = rows[i][: head.outputs] * np.float32(head.scale) + np.float32(head.shift)
            rows[i] = np.concatenate([numbers, rows[i][head.outputs :]])
        return rows

    return split
