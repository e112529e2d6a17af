"""Programs: on the CPU the functions themselves; on a GPU, here a stand-in for one, what happens where things fail."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

from adapterbank.errors import SlowerWarning
from adapterbank.inference.graphs import GraphCompiler

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Device:
    """Stands in for a GPU: `torch.compile` and CUDA graphs that work, or fail as they are told to."""

    def __init__(self, monkeypatch):
        self.compiled, self.graphs, self.replays, self.pools = [], [], 0, []
        self.compile_error = self.capture_error = None
        self.capturing = False

        class Graph:
            def pool(graph):
                return f"pool {self.graphs.index(graph)}"

            def replay(graph):
                self.replays += 1

        class Stream:
            def __init__(stream, device=None):
                pass

            def wait_stream(stream, other):
                pass

        @contextlib.contextmanager
        def capture(graph, pool=None, **options):
            self.graphs.append(graph)
            self.pools.append(pool)
            self.capturing = True
            try:
                yield
                if self.capture_error:
                    raise self.capture_error
            finally:
                self.capturing = False

        def compile_(function, **options):
            self.compiled.append(function)

            def quick(*arguments, **more):
                if self.compile_error:
                    raise self.compile_error
                return ("compiled", function(*arguments, **more))

            return quick

        monkeypatch.setattr(torch, "compile", compile_)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", capture)


@pytest.fixture
def gpu(monkeypatch):
    return Device(monkeypatch)


def double(x, *, plus=0):
    return 2 * x + plus


class Body:
    """Work that counts how often it is done, with some function at its heart."""

    def __init__(self, function=double):
        self.function, self.given = function, []

    def __call__(self):
        self.given.append(self.function(4, plus=1))


# --- on the CPU


def test_on_the_cpu_programs_are_the_functions_themselves(monkeypatch):
    def never(*_, **__):
        raise AssertionError("compiled or captured")

    for owner, name in ((torch, "compile"), (torch.cuda, "CUDAGraph"), (torch.cuda, "Stream"), (torch.cuda, "graph")):
        monkeypatch.setattr(owner, name, never)
    programs, body = GraphCompiler(CPU), Body()
    assert programs.compiled(double) is double
    assert programs.capture(body) is body
    assert body.given == []  # not even tried


# --- where all goes well


def test_a_function_is_compiled_once_whoever_asks(gpu):
    programs = GraphCompiler(GPU)
    one, two = programs.compiled(double), programs.compiled(double)
    assert one(3, plus=1) == two(3, plus=1) == ("compiled", 7)
    assert gpu.compiled == [double]


def test_work_is_tried_then_captured_then_only_replayed(gpu):
    programs, body = GraphCompiler(GPU), Body()
    body.function = programs.compiled(double)
    replay = programs.capture(body)
    done = len(body.given)
    assert done >= 2  # at least once beside the capture, which needs all to be ready
    assert set(body.given) == {("compiled", 9)}
    for _ in range(3):
        replay()
    assert (len(body.given), gpu.replays) == (done, 3)


def test_all_captures_share_one_pool_of_memory(gpu):
    programs = GraphCompiler(GPU)
    for _ in range(3):
        programs.capture(Body())
    assert gpu.pools == [None, "pool 0", "pool 0"]


# --- where it does not


def test_a_compiler_that_fails_is_done_without_and_that_is_said_once(gpu):
    programs, body, other = GraphCompiler(GPU), Body(), Body()
    body.function = other.function = programs.compiled(double)
    gpu.compile_error = RuntimeError("Cannot find a working triton installation\nmore of it")
    with pytest.warns(
        SlowerWarning, match=r"not be compiled.*slower.*RuntimeError: Cannot find a working triton"
    ) as said:
        replay = programs.capture(body)
    assert len(said) == 1
    assert "more of it" not in str(said[0].message)
    assert set(body.given) == {9}  # the function itself
    replay()
    assert gpu.replays == 1  # captured all the same
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        programs.capture(other)
        assert programs.compiled(max) is max
    assert set(other.given) == {9}


def test_any_error_of_a_compiler_is_taken_for_one(gpu):
    programs, body = GraphCompiler(GPU), Body()
    body.function = programs.compiled(double)
    gpu.compile_error = ImportError()
    with pytest.warns(SlowerWarning, match="ImportError"):
        programs.capture(body)
    assert set(body.given) == {9}


def test_an_error_of_the_work_itself_is_raised_not_hidden(gpu):
    def broken():
        raise ValueError("mat1 and mat2")

    with pytest.warns(SlowerWarning), pytest.raises(ValueError, match="mat1 and mat2"):
        GraphCompiler(GPU).capture(broken)


def test_a_capture_that_fails_is_done_without_and_that_is_said_once(gpu):
    programs, body, other = GraphCompiler(GPU), Body(), Body()
    gpu.capture_error = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(SlowerWarning, match=r"not be captured in a CUDA graph.*not permitted") as said:
        run = programs.capture(body)
    assert len(said) == 1
    assert run is body
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert programs.capture(other) is other
    assert len(gpu.graphs) == 1  # not tried again
    assert programs.compiled(double)(1) == ("compiled", 2)  # one has nothing to do with the other


@pytest.mark.parametrize("where", ["compile_error", "capture_error"])
def test_a_lack_of_memory_is_for_the_caller_to_mend(where, gpu):
    programs, body = GraphCompiler(GPU), Body()
    body.function = programs.compiled(double)
    setattr(gpu, where, torch.OutOfMemoryError("CUDA out of memory."))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            programs.capture(body)
    setattr(gpu, where, None)
    programs.capture(body)()  # with less to do it may go well, as quick as ever
    assert gpu.replays == 1
    assert body.given[-1] == ("compiled", 9)
