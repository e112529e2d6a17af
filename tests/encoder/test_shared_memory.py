"""Claims about shared tensors: equal to the bit, one memory for all processes, read-only."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys

import pytest
import torch

from adapterbank.encoder.forward import join_projections
from adapterbank.encoder.shared_memory import attach, share
from families import FAMILIES

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory")

_OTHER = """
import sys
from adapterbank.encoder.shared_memory import attach
backbone = attach(sys.argv[1], int(sys.argv[2]))
print(backbone.sha256, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def shared(request, tiny):
    """Return a backbone, the same one shared, and its descriptor."""
    own = tiny(getattr(request, "param", "bert"))
    found, descriptor = share(own)
    yield own, found, descriptor
    os.close(descriptor)


def mapped(pid):
    """Return the figures of a process's mapping of shared tensors, in kB."""
    with open(f"/proc/{pid}/smaps") as file:
        text = file.read()
    (part,) = re.findall(r"memfd:adapterbank-encoder.*\n((?:[A-Z]\w+:.*\n)+)", text)
    return {name: int(kb) for name, kb in re.findall(r"(\w+): +(\d+) kB", part)}


@pytest.mark.parametrize("shared", sorted(FAMILIES), indirect=True)
def test_every_tensor_is_the_same_to_the_bit_and_aligned_as_torch_aligns_it(shared):
    own, found, _ = shared
    assert found.tensors.keys() == own.tensors.keys()
    for name, tensor in own.tensors.items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].data_ptr() % 64 == 0
    assert attach(str(own.folder), shared[2]).sha256 == own.sha256
    texts = ["the big cat was good", "it is a mat"]
    for one, other in zip(own.encode(texts), found.encode(texts), strict=True):
        assert (one == other).all()


def test_query_key_and_value_become_one_matrix_without_a_copy(shared):
    own, found, _ = shared
    plain, joined = join_projections(own.tensors), join_projections(found.tensors)
    begin = min(tensor.data_ptr() for tensor in found.tensors.values())
    for name in (name for name in joined if ".joined." in name):
        assert torch.equal(plain[name], joined[name])
        assert joined[name].untyped_storage().data_ptr() <= begin <= joined[name].data_ptr()
    assert any(".joined." in name for name in joined)
    assert all(torch.equal(plain[name], joined[name]) for name in plain)


def test_the_shared_memory_cannot_be_written(shared):
    _, found, descriptor = shared
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    name = next(iter(found.tensors))
    attach(str(found.folder), descriptor).tensors[name].add_(1)
    assert torch.equal(attach(str(found.folder), descriptor).tensors[name], found.tensors[name])


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the system does not tell who shares pages")
def test_two_processes_share_the_pages(shared):
    own, found, descriptor = shared
    words = [sys.executable, "-c", _OTHER, str(own.folder), str(descriptor)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, pass_fds=[descriptor], **pipes) as other:
        assert other.stdout.readline().strip() == own.sha256  # which has read every tensor
        assert sum(float(tensor.sum()) for tensor in found.tensors.values())
        size = sum(tensor.nbytes for tensor in found.tensors.values()) // 1024
        for figures in (mapped("self"), mapped(other.pid)):
            assert figures["Rss"] >= size
            assert figures["Pss"] < 0.6 * figures["Rss"]
            assert figures["Private_Dirty"] == figures["Anonymous"] == 0
        other.stdin.write("\n")
