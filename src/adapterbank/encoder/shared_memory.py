"""One encoder's tensors for many processes: written once to sealed memory that each maps. Knows no tasks and no slots.

The checkpoint file itself is not mapped: its tensors have arbitrary alignment, and the last bit of a product depends on
that. Here each tensor starts at a multiple of 64 bytes, as torch's own do, and the seal prevents all writes. The memory
has no name. It is reached through an open file descriptor and freed when the last process closes it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from adapterbank.encoder import backbone as checkpoint
from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.forward import QKV

_ALIGNMENT = 64
_ORDER = {part: i for i, part in enumerate(QKV)}


def share(backbone: Backbone) -> tuple[Backbone, int | None]:
    """Return the backbone with its tensors in shared memory, and the descriptor that other processes `attach` to.

    On systems without such memory (macOS) return the backbone as it is, and None.
    """
    if not hasattr(os, "memfd_create"):
        return backbone, None
    head, places, total = _layout(backbone.tensors)
    descriptor = os.memfd_create("adapterbank-encoder", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, total)
    with mmap.mmap(descriptor, total) as memory:
        memory[: len(head)] = head
        for name, begin in places.items():
            data = backbone.tensors[name].contiguous().numpy().tobytes()
            memory[begin : begin + len(data)] = data
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return replace(backbone, tensors=_mapped(descriptor)), descriptor


def attach(name: str, descriptor: int) -> Backbone:
    """Return a backbone whose tensors another process shares; config and tokenizer are read from `name`."""
    return checkpoint.load(name, _mapped(descriptor))


def _mapped(descriptor: int) -> dict[str, Tensor]:
    """Map the memory. The mapping is private: torch requires a writable buffer, and the seal allows no other."""
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    length = int.from_bytes(memory[:8], "little")
    head = json.loads(memory[8 : 8 + length])
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    found = {}
    for name, (begin, shape) in head.items():
        count = 4 * torch.Size(shape).numel()
        found[name] = whole[begin : begin + count].view(torch.float32).view(shape)
    return found


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return the header, the offset of each tensor, and the total size."""
    places: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=_together):
        places[name] = end
        end += -(-4 * tensors[name].numel() // _ALIGNMENT) * _ALIGNMENT
    start = 0
    while True:  # the length of the header depends on the numbers in it
        offsets = {name: [start + begin, list(tensors[name].shape)] for name, begin in places.items()}
        text = json.dumps(offsets).encode()
        if 8 + len(text) <= start:
            break
        start = -(-(8 + len(text)) // mmap.PAGESIZE) * mmap.PAGESIZE
    head = len(text).to_bytes(8, "little") + text
    return head, {name: start + begin for name, begin in places.items()}, start + end


def _together(name: str) -> tuple[str, str, int]:
    """Return a sort key that puts query, key and value of a layer side by side: one matrix, without a copy."""
    prefix, _, leaf = name.rpartition(".")
    above, _, part = prefix.rpartition(".")
    return (above, leaf, _ORDER[part]) if part in _ORDER else (prefix, leaf, 0)
