"""A batch of rows of any slots as a program: the same kernels for any choice of slots. Knows no names and no texts.

Each row brings its own slot: before the program runs, the slots of a batch are copied side by side into its *stage*,
one row of a block each, so the program never learns which they were. Slots of other sizes or label counts are widened
with zeros on the way. Rows of one slot share its place where enough of them came together; a batch of one slot has a
stage of one. Counts of rows and lengths are rounded up to a few.
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

STAGED_BYTES = 2 << 30
"""Bytes that all stages together may take; the one in use may be larger."""
ROWS = 256
"""Rows of one batch at most: each may need a place in the stage."""
ROWS_PER_PLACE = 8
"""Rows of one slot that share a place: fewer copies, and products of more than one row's tokens."""
_WARM = 2 * ROWS_PER_PLACE
"""Rows of a batch that is computed to no other end than to have its programs made."""
Wait = Callable[[], list[np.ndarray]]
"""Waits for a device that was set to work, and gives each row's outputs; see `evaluate.outputs`."""


class _Stage:
    """Where the slots of a batch lie side by side."""

    def __init__(self, layouts: Sequence[RowLayout], places: int, dtype: torch.dtype, device: torch.device) -> None:
        types = {layout: torch.float32 if layout.head else dtype for layout in layouts}
        rows = {layout: torch.zeros(places, layout.width, dtype=types[layout], device=device) for layout in layouts}
        self.own = {name: view for layout, found in rows.items() for name, view in layout.views(found).items()}
        self.rows = {_part(layout): (layout, found.unbind(0)) for layout, found in rows.items()}
        self.words = {layout: found.view(torch.int32).unbind(0) for layout, found in rows.items()}  # see Block
        self.holds: list[int | None] = [None] * places  # the slot that lies in each row now
        self.bytes = sum(found.numel() * found.element_size() for found in rows.values())
        self.programs: dict[_Shape, _Program] = {}


@dataclass
class _Ferry:
    """The host's side of one run: what goes over and what comes back."""

    there: Tensor  # [B * (2 L + 1)] ids, types and lengths
    cells: np.ndarray  # the same memory
    back: Tensor | None = None  # the outputs


@dataclass
class _Program:
    """One shape of batch: where rows are written, what runs, where the outputs appear."""

    rows: Tensor  # as `_Ferry.there`
    out: Tensor | None = None
    run: Callable[[], None] | None = None
    free: list[_Ferry] = field(default_factory=list)  # those of runs whose outputs were taken


@dataclass(frozen=True)
class _Shape:
    """What a program is made for."""

    family: int | None
    layouts: tuple[RowLayout, ...]
    places: int
    """Slots, each with an equal share of the rows: one for all, for a few or for each; none for the bare encoder."""
    rows: int
    longest: int


class GraphRunner:
    """All programs of one encoder and its stacks."""

    def __init__(self, config: EncoderConfig, stacks: Stacks, programs: GraphCompiler) -> None:
        """Nothing is made before it is asked for."""
        self._config, self._stacks, self._programs = config, stacks, programs
        self._layer_fns = compiled_layer_fns(programs.compiled)
        self._on_gpu = stacks.device.type == "cuda"
        self._fused = fused_attention(config, stacks.device)
        self.stages: OrderedDict[tuple[tuple[RowLayout, ...], int], _Stage] = OrderedDict()
        self._maps: dict[tuple[RowLayout, RowLayout], Tensor] = {}

    def filled(self, length: int) -> int:
        """Return the length that a row is filled up to, if it is the longest of its batch."""
        return padded_length(length, self._config.max_length)

    def warm(self) -> None:
        """Make programs of every kind for the slots that there are, so that no row has to wait for a compiler."""
        row = Tokens(np.zeros(1, np.int64), np.zeros(1, np.int64))
        families = {self._stacks.slot(slot).family: slot for slot in self._stacks.numbers}
        for slot in families.values():
            for places in (1, _WARM // ROWS_PER_PLACE, _WARM) if not self._stacks.plan(slot).alone else ():
                self.launch([row] * _WARM, [slot] * _WARM, places)()

    def launch(self, tokens: Sequence[Tokens], slots: Sequence[int | None], places: int | None = None) -> Wait:
        """Set a device to work on rows whose slots are of one family; what is given waits for the head outputs.

        Meanwhile the next ones can be launched: a device does one after the other. `places` is how many places of the
        stage the slots take, if not as few as do.
        """
        counts = Counter(slots)
        known: dict[int | None, Slot] = {slot: self._stacks.slot(slot) for slot in counts if slot is not None}
        first = next(iter(known.values()), None)
        rows = 1 << (len(tokens) - 1).bit_length()
        sizes = np.array([len(row.ids) for row in tokens])
        layouts = _widest(list(known.values()))
        places = (places or _places(counts, rows)) if layouts else 0
        shape = _Shape(first.family if first else None, layouts, places, rows, self.filled(int(sizes.max())))
        stage = self._stage(layouts, places)
        # The device copies while the host lays out the tokens.
        seats = np.array(self._fill(stage, slots, counts, rows))
        program = stage.programs.get(shape) or self._program(stage, shape)
        ferry = program.free.pop() if program.free else self._ferry(program)
        _write(ferry.cells, tokens, sizes, seats, shape)
        program.rows.copy_(ferry.there, non_blocking=True)
        if program.run is None:
            plan = first.plan if first else None
            program.run = self._programs.capture(lambda: self._body(program, stage, plan, shape))
        program.run()
        over = self._send_back(program, ferry)

        def wait() -> list[np.ndarray]:
            out = over()[seats]
            program.free.append(ferry)
            return _split(out, sizes, slots, known)

        return wait

    def _send_back(self, program: _Program, ferry: _Ferry) -> Callable[[], np.ndarray]:
        """Let the outputs come over once they are there; what is given waits for that."""
        assert program.out is not None
        if ferry.back is None:
            ferry.back = self._on_host(torch.zeros_like(program.out, device="cpu"))
        ferry.back.copy_(program.out, non_blocking=True)
        done = torch.cuda.Event() if self._on_gpu else None
        if done:
            done.record(torch.cuda.current_stream(self._stacks.device))
        back = ferry.back.numpy()

        def wait() -> np.ndarray:
            if done:
                done.synchronize()
            return back

        return wait

    def _stage(self, layouts: tuple[RowLayout, ...], places: int) -> _Stage:
        """Return the stage for some layouts; the longest unused go, with their programs, when all take too much."""
        key = (layouts, places)
        if key not in self.stages:
            self.stages[key] = _Stage(layouts, places, self._stacks.dtype, self._stacks.device)
        self.stages.move_to_end(key)
        while len(self.stages) > 1 and sum(stage.bytes for stage in self.stages.values()) > STAGED_BYTES:
            if self._on_gpu:
                torch.cuda.synchronize(self._stacks.device)  # it may be at work with one of its programs
            self.stages.popitem(last=False)
        return self.stages[key]

    def _program(self, stage: _Stage, shape: _Shape) -> _Program:
        size = shape.rows * (2 * shape.longest + 1)
        return stage.programs.setdefault(
            shape, _Program(torch.zeros(size, dtype=torch.int64, device=self._stacks.device))
        )

    def _ferry(self, program: _Program) -> _Ferry:
        there = self._on_host(torch.zeros_like(program.rows, device="cpu"))
        return _Ferry(there, there.numpy())

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Return memory of the host that a GPU reads and writes by itself."""
        return tensor.pin_memory() if self._on_gpu else tensor

    def _fill(self, stage: _Stage, slots: Sequence[int | None], counts: Counter[int | None], rows: int) -> list[int]:
        """Return each row a seat, where its slot lies in the stage already if it does, and copy in what is missing."""
        if len(stage.holds) <= 1:  # one slot for all rows, or none
            self._copy(stage, [(0, number) for number in slots[: len(stage.holds)] if number is not None])
            return list(range(len(slots)))
        share = rows // len(stage.holds)
        wanted = [number for number, count in counts.items() for _ in range(-(-count // share))]
        free: dict[int | None, list[int]] = {}
        for place, number in enumerate(stage.holds):
            free.setdefault(number, []).append(place)
        places = [free[number].pop() if free.get(number) else -1 for number in wanted]
        left = iter(sorted(set(range(len(stage.holds))).difference(places)))
        places = [place if place >= 0 else next(left) for place in places]
        self._copy(stage, [(place, n) for place, n in zip(places, wanted, strict=True) if n is not None])
        seats: dict[int | None, list[int]] = {}
        for place, number in zip(places, wanted, strict=True):
            seats.setdefault(number, []).extend(range(place * share, (place + 1) * share))
        taken = {number: iter(mine) for number, mine in seats.items()}
        return [next(taken[number]) for number in slots]

    def _copy(self, stage: _Stage, wanted: Sequence[tuple[int, int]]) -> None:
        wide: list[Tensor] = []
        mine: list[Tensor] = []
        for place, number in wanted:
            if stage.holds[place] == number:
                continue
            stage.holds[place] = None  # until it is whole: a copy may fail for lack of memory
            for block, row in self._stacks.slot(number).rows:
                layout, into = stage.rows[_part(block.layout)]
                if layout is block.layout:
                    wide.append(stage.words[layout][place])
                    mine.append(block.words[row])
                else:
                    torch.index_select(block.each[row], 0, self._map(block.layout, layout), out=into[place])
        if wide:
            torch._foreach_copy_(wide, mine)
        for place, number in wanted:
            stage.holds[place] = number

    def _map(self, narrow: RowLayout, wide: RowLayout) -> Tensor:
        """Say where each number of a wide row stands in a narrow one; the narrow one's last number is always 0."""
        if (narrow, wide) not in self._maps:
            index = torch.full((wide.width,), narrow.width - 1)
            for name, (start, end) in wide.ranges.items():
                first, last = narrow.ranges[name]
                numbers = torch.arange(first, last).view(narrow.shapes[name])
                index[start:end].view(wide.shapes[name])[tuple(slice(n) for n in numbers.shape)] = numbers
            self._maps[narrow, wide] = index.to(self._stacks.device)
        return self._maps[narrow, wide]

    @torch.inference_mode()
    def _body(self, program: _Program, stage: _Stage, plan: Plan | None, shape: _Shape) -> None:
        """Do what a program does, on the tensors that `launch` has filled."""
        # A task's own scale is applied to what comes out.
        head = replace(plan.head, shift=0.0, scale=1.0) if plan else heads.BARE
        cells = shape.rows * shape.longest
        ids, types = program.rows[: 2 * cells].view(2, -1).unbind(0)
        batch = PaddedBatch.of(ids, types, program.rows[2 * cells :], self._fused)
        uniform = StaticRoute(self._stacks.frozen, stage.own, plan)
        hidden = forward(self._config, uniform, batch, layer_fns=self._layer_fns)
        x = heads.reads(hidden, batch, head, uniform.linear)
        if plan:
            x = heads.apply(x.view(shape.places, -1, x.shape[-1]).squeeze(0), head, uniform.own)
        per_token = KINDS[head.kind].per_token
        x = x.float().view(shape.rows, shape.longest, -1) if per_token else x.float().view(shape.rows, -1)
        if program.out is None:
            program.out = torch.empty_like(x)
        program.out.copy_(x)


def _write(into: np.ndarray, tokens: Sequence[Tokens], sizes: np.ndarray, seats: np.ndarray, shape: _Shape) -> None:
    """Lay rows out side by side, ids, then types, then lengths; rows that are not there have one token."""
    cells = shape.rows * shape.longest
    into[: 2 * cells] = 0
    into[2 * cells :] = 1
    where = cell_numbers(sizes, seats * shape.longest)
    into[where] = np.concatenate([row.ids for row in tokens])
    into[cells + where] = np.concatenate([row.types for row in tokens])
    into[2 * cells + seats] = sizes


def _places(counts: Counter[int | None], rows: int) -> int:
    """Count the places that a batch of so many rows needs: one for each slot's few rows if that pads nothing more."""
    if len(counts) == 1:
        return 1
    shared = sum(-(-count // ROWS_PER_PLACE) for count in counts.values())
    return rows // ROWS_PER_PLACE if shared * ROWS_PER_PLACE <= rows else rows


def _part(layout: RowLayout) -> tuple[bool, bool]:
    return layout.head, layout.decays


def _widest(slots: Sequence[Slot]) -> tuple[RowLayout, ...]:
    """Return the layouts that hold every slot of a family: of each part the widest."""
    found: dict[tuple[bool, bool], RowLayout] = {}
    for layouts in {slot.layouts for slot in slots}:
        for layout in layouts:
            if layout.numbers > getattr(found.get(_part(layout)), "numbers", 0):
                found[_part(layout)] = layout
    return tuple(found[part] for part in sorted(found))


def _split(
    out: np.ndarray, sizes: np.ndarray, slots: Sequence[int | None], known: Mapping[int | None, Slot]
) -> list[np.ndarray]:
    """Return each row its own part of the outputs, on its task's own scale."""
    if not known:
        return list(out)
    plans = {slot: held.plan.head for slot, held in known.items()}
    if KINDS[next(iter(plans.values())).kind].per_token:  # so are the others of its family
        return [row[:size] for row, size in zip(out, sizes.tolist(), strict=True)]
    widths = {slot: head.outputs for slot, head in plans.items()}
    found = [row[: widths[slot]] for row, slot in zip(out, slots, strict=True)]
    if scaled := {slot for slot, head in plans.items() if KINDS[head.kind].standardize}:
        for i, slot in enumerate(slots):
            if slot in scaled:
                found[i] = found[i] * np.float32(plans[slot].scale) + np.float32(plans[slot].shift)
    return found
