"""Whole fits whose steps are replayed as CUDA graphs, on a CPU: what of CUDA a fit with ``cuda_graph`` touches is replaced here.

Captures and replays are those of :mod:`tests.cuda_on_cpu.capture`, and the kernels of fused optimizers are compiled for the CPU.
Nothing runs asynchronously, and graphs and eager steps share no memory.  The rest of the package runs as it is.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from fabricamp import cuda_graph
from fabricamp.engine.graph import cache, captured, graphs, memory_budget, refusals
from fabricamp.engine.graph.host_effects import Generators, LogWatch
from fabricamp.metrics import Metrics
from fabricamp.ops import bridge, table, uploads
from tests.cuda_on_cpu.capture import Graph, _beside, _recorded
from tests.cuda_on_cpu.compiler import _forget, compiler


@dataclass
class Card:
    """The device of such fits: how much memory is free, and what has happened on it."""

    free: int = 2**40
    events: list[str] = field(default_factory=list)
    """In order: "capture", "replay", and "lent" for an eager step in the graphs' memory."""
    keeps: bool = False
    """Whether the next look finds a tensor of an eager step in the graphs' memory."""

    @property
    def replays(self):
        """The number of replays."""
        return self.events.count("replay")

    @property
    def is_capturing(self):
        """Whether a step is being captured."""
        return Graph.now is not None


class CUDAGraph:
    """In place of torch's."""

    def __init__(self, card):
        self._card = card
        self.graph = Graph()

    def register_generator_state(self, generator):
        pass

    def replay(self):
        self._card.events.append("replay")
        with torch.no_grad():
            self.graph.replay()


class Pool:
    """In place of a :class:`~fabricamp.engine.graph.memory_pool.GraphPool`: has no memory, but knows whether it is lent."""

    id = (0, 1)

    def __init__(self, card, stream):
        self._card = card
        self.is_lent = False

    def reserved(self):
        return 0

    @contextlib.contextmanager
    def lent(self):
        self._card.events.append("lent")
        self.is_lent = True
        yield

    def begin(self):
        self.is_lent = False

    def reclaim(self):
        if self.is_lent and self._card.keeps:
            self._card.keeps = False
            return False
        self.is_lent = False
        return True

    def note_capture(self):
        pass


class Event:
    """In place of torch's; no time passes."""

    def __init__(self, **options):
        pass

    def record(self, *stream):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 0.0


class Stream(SimpleNamespace):
    """In place of torch's."""

    def synchronize(self):
        pass

    def wait_stream(self, other):
        pass


class SideStream:
    """In place of the stream of a session's graphs."""

    def __init__(self, device):
        self.stream = STREAM

    def leave(self, *, wait):
        pass


STREAM = Stream(device=torch.device("cpu"), cuda_stream=1)


@pytest.fixture
def card(monkeypatch):
    """Lets the fits of a test capture and replay their steps on the CPU; returns the :class:`Card`."""
    yield install(monkeypatch)
    _forget()


def install(monkeypatch):
    """Does that in this process, as a rank that has no fixture does."""
    card = Card()

    @contextlib.contextmanager
    def capturing(graph, pool=None, stream=None, capture_error_mode=None):
        card.events.append("capture")
        with graph.graph:
            yield

    _replace_cuda(monkeypatch, capturing, card)
    monkeypatch.setitem(bridge.COMPILERS, "cpu", _recorded(compiler(False)))
    monkeypatch.setitem(uploads.CAPTURES, "cpu", uploads.Captures(lambda: card.is_capturing, _beside))
    monkeypatch.setattr(table, "_tables", {})
    monkeypatch.setattr(table, "THREADS", 64)
    for module in (cuda_graph, graphs, refusals):
        against = module.reason_against
        monkeypatch.setattr(module, "reason_against", lambda _, *parts, against=against: against("cuda", *parts))
    monkeypatch.setattr(graphs.Graphs, "_wanted", property(lambda self: self._session.settings.cuda_graph is not None))
    monkeypatch.setattr(graphs.Graphs, "_reason_for_eager_evaluation", lambda self: "")
    monkeypatch.setattr(graphs, "SideStream", SideStream)
    monkeypatch.setattr(cache, "GraphPool", lambda stream: Pool(card, stream))
    monkeypatch.setattr(memory_budget, "free_memory", lambda device: card.free)
    monkeypatch.setattr(captured, "end_failed_capture", lambda device, pool: None)
    monkeypatch.setattr(Generators, "registered_with", lambda self, graph: contextlib.nullcontext())
    # Tensors on the CPU are those of the device.
    keep = LogWatch.keep
    monkeypatch.setattr(LogWatch, "keep", lambda self, call, value, size=None: _keep(keep, self, call, value, size))
    make = Metrics.__init__

    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        self.reads_cpu_tensors = False

    monkeypatch.setattr(Metrics, "__init__", made)
    _forget()
    return card


def _keep(keep, watch, call, value, size):
    return watch._metrics.keep(call, value, size) if isinstance(value, torch.Tensor) else keep(watch, call, value, size)


def _replace_cuda(monkeypatch, capturing, card):
    """Replaces what the package calls of ``torch.cuda``."""
    mode = ["default"]
    calls = {
        "CUDAGraph": lambda: CUDAGraph(card),
        "graph": capturing,
        "Event": Event,
        "current_stream": lambda device=None: STREAM,
        "default_generators": (torch.Generator(),),
        "current_device": lambda: 0,
        "get_sync_debug_mode": lambda: mode[0],
        "set_sync_debug_mode": lambda value: mode.__setitem__(0, value),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "graph_pool_handle": lambda: (0, 2),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
