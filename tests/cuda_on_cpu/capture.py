"""A CUDA graph of launches on CPU tensors: a capture records launches without running them, and each replay runs them."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fabricamp.ops import bridge, uploads

__all__ = ["Graph", "graphs"]


class Graph(TorchDispatchMode):
    """Captures torch's operations and kernels that are called within it; ``replay`` runs them.

    As in a real capture, a new tensor has memory but no values yet: here it holds numbers that tests would notice.
    """

    now = None

    def __init__(self):
        super().__init__()
        self.nodes = []
        self.kept = []

    def __enter__(self):
        Graph.now = self
        return super().__enter__()

    def __exit__(self, *error):
        Graph.now = None
        super().__exit__(*error)

    def replay(self):
        for node in self.nodes:
            node()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a capture cannot read what has not run")
        arguments = function._schema.arguments
        written = [one for one in arguments if one.alias_info is not None and one.alias_info.is_write]
        if written:
            self.nodes.append(lambda: function(*args, **kwargs))
            named = dict(zip([one.name for one in arguments], args, strict=False)) | kwargs
            results = [named[one.name] for one in written[: len(function._schema.returns)]]
            return results[0] if len(results) == 1 else tuple(results) or None
        if function.is_view:
            return function(*args, **kwargs)
        # With copies, because some operations write what they do not say: batch normalization its running statistics.
        # What an operation of the package launches is a part of it, and its memory is gone when it returns.
        Graph.now = None
        try:
            results = function(*tree_map_only(torch.Tensor, torch.Tensor.clone, args), **kwargs)
        finally:
            Graph.now = self
        outputs = _tensors(results)

        def run():
            now = function(*args, **kwargs)
            for one in tree_leaves(now):
                if isinstance(one, torch.ScriptObject) and hasattr(one, "wait"):
                    one.wait()  # a collective: the next operation on its stream does
            for own, new in zip(outputs, _tensors(now), strict=True):
                own.copy_(new)

        self.nodes.append(run)
        for one in outputs:
            one.fill_(7 if one.is_floating_point() else 0)  # an index of 7 might be none
        return results


def _tensors(results):
    return [one for one in tree_leaves(results) if isinstance(one, torch.Tensor)]


@contextlib.contextmanager
def _beside(device):
    graph, Graph.now = Graph.now, None
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            yield
    finally:
        Graph.now = graph


def _recorded(compile_it):
    def compile_for_capture(text, function, *given):
        launch = compile_it(text, function, *given)
        types = bridge.parameter_types(text, function)

        def run(blocks, threads, arguments, stream):
            if Graph.now is None:
                launch(blocks, threads, arguments, stream)
                return
            kept = _as_now(arguments, types)
            Graph.now.nodes.append(lambda: launch(blocks, threads, ctypes.addressof(kept[0]), stream))

        return run

    return compile_for_capture


def _as_now(arguments, types):
    """Returns a copy of the addresses of a launch's arguments, and of the numbers there: their memory is that of later launches.

    Structures are by themselves, and stay.
    """
    addresses = (ctypes.c_void_p * len(types)).from_buffer_copy((ctypes.c_void_p * len(types)).from_address(arguments))
    values = (ctypes.c_uint64 * len(types))()
    for index, kind in enumerate(types):
        if kind in ("pointer", "int64", "double"):
            values[index] = ctypes.c_uint64.from_address(addresses[index]).value
            addresses[index] = ctypes.addressof(values) + 8 * index
    return addresses, values


class CudaGraph:
    """A real CUDA graph with the interface of :class:`Graph`."""

    def __init__(self):
        self._graph, self._stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __enter__(self):
        self._context = torch.cuda.graph(self._graph, stream=self._stream)
        self._context.__enter__()

    def __exit__(self, *error):
        self._context.__exit__(*error)

    def replay(self):
        self._graph.replay()


@pytest.fixture
def graphs(kernel_device, monkeypatch):
    """Returns the graph class for ``kernel_device``; usage: ``with graph: step()``, then ``graph.replay()``."""
    if kernel_device.type == "cuda":
        return CudaGraph
    monkeypatch.setitem(uploads.CAPTURES, "cpu", uploads.Captures(lambda: Graph.now is not None, _beside))
    monkeypatch.setitem(bridge.COMPILERS, "cpu", _recorded(bridge.COMPILERS["cpu"]))
    return Graph
