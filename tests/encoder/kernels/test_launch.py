"""`encoder.kernels.launch`: kernels are launched, or compiled by threads without being launched."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from adapterbank.encoder.kernels import launch as launches
from adapterbank.encoder.kernels.launch import Compilation, CompilerError, compiling, launch


class Kernel:
    """Records what it is asked to do."""

    def __init__(self, error=None, gate=None, too_large=None):
        self.launched, self.compiled, self.threads = [], [], []
        self.error, self.gate, self.too_large = error, gate, too_large

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))

    def warmup(self, *arguments, grid, **constants):
        if self.gate:
            self.gate.wait(10)
        if self.error:
            raise self.error
        self.threads.append(threading.current_thread())
        self.compiled.append((grid, arguments, constants))
        return self

    @property
    def run(self):
        """As Triton does, load what was compiled."""
        if self.too_large:
            raise self.too_large


def test_a_kernel_is_launched_with_its_grid_arguments_and_constants():
    kernel = Kernel()
    launch(kernel, (2, 3), 7, "x", WIDTH=4)
    assert kernel.launched == [((2, 3), (7, "x"), {"WIDTH": 4})]
    assert not kernel.compiled


def test_within_compiling_a_kernel_is_compiled_by_another_thread_once_for_each_form():
    kernel, compilation = Kernel(), Compilation()
    with compiling(compilation):
        for number in (32, 48, 7, 1, 9):  # divisible by 16; not; one
            for tensor in (torch.zeros(4), torch.ones(9)):
                launch(kernel, (number,), tensor, number, WIDTH=4)
        launch(kernel, (1,), torch.zeros(4, dtype=torch.bfloat16), 32, WIDTH=4)
        launch(kernel, (1,), torch.zeros(4), 32, WIDTH=8)
    compilation.wait()
    assert compilation.done
    assert not kernel.launched
    assert len(kernel.compiled) == 3 + 2
    assert threading.current_thread() not in kernel.threads
    launch(kernel, (1,), 5)
    assert kernel.launched == [((1,), (5,), {})]


def test_it_is_done_when_the_last_kernel_is_compiled():
    gate, compilation = threading.Event(), Compilation()
    with compiling(compilation):
        launch(Kernel(gate=gate), (1,), 1)
        launch(Kernel(), (1,), 1)
    assert not compilation.done
    gate.set()
    compilation.wait()
    assert compilation.done


def test_what_is_closed_compiles_nothing_further():
    gate, first, others, compilation = threading.Event(), Kernel(), Kernel(), Compilation()
    first.gate = gate
    with compiling(compilation):
        for number in range(64):
            launch(first, (1,), 7, WIDTH=number)
        launch(others, (1,), 7)
    compilation.close()
    gate.set()
    compilation._pool.shutdown(wait=True)
    assert len(first.compiled) <= launches._THREADS
    assert not others.compiled


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_threads_compile_for_the_gpu_of_their_run(name):
    kernel, compilation = Kernel(), Compilation(torch.device(name))
    with compiling(compilation):
        launch(kernel, (1,), 1)
    compilation.wait()
    assert len(kernel.compiled) == 1


def test_tensors_are_not_kept_until_their_kernel_is_compiled():
    gate, kernel, compilation = threading.Event(), Kernel(), Compilation()
    kernel.gate = gate
    tensors = [torch.zeros(64, dtype=torch.bfloat16), torch.zeros(65)[1:]]
    alive = [weakref.ref(tensor) for tensor in tensors]
    with compiling(compilation):
        launch(kernel, (1,), *tensors)
    forms = [launches._form(tensor) for tensor in tensors]
    del tensors
    assert [one() for one in alive] == [None, None]
    gate.set()
    compilation.wait()
    ((_, arguments, _),) = kernel.compiled
    assert [launches._form(argument) for argument in arguments] == forms


def test_what_a_compiler_raises_is_named():
    compilation = Compilation()
    with compiling(compilation):
        launch(Kernel(error=OSError("ptxas is missing\nand more")), (1,), 1)
    with pytest.raises(CompilerError, match=r"^OSError: ptxas is missing$"):
        compilation.wait()
    with pytest.raises(CompilerError):
        _ = compilation.done


def test_a_kernel_that_does_not_fit_into_the_gpu_is_known_before_it_is_launched():
    compilation = Compilation()
    with compiling(compilation):
        launch(Kernel(too_large=MemoryError("out of resource: shared memory")), (1,), 1)
    with pytest.raises(CompilerError, match="shared memory"):
        compilation.wait()


def test_kernels_of_gradients_are_compiled_too():
    forward, backward, compilation = Kernel(), Kernel(), Compilation()

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            launch(forward, (1,), x)
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            launch(backward, (1,), dy)
            return 2 * dy

    with compiling(compilation):
        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad(Double.apply(x).sum(), [x])
    compilation.wait()
    assert [len(kernel.compiled) for kernel in (forward, backward)] == [1, 1]
    assert not forward.launched
    assert not backward.launched
