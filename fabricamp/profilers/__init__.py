"""Profilers: measure the time that a run spends in each named action."""

from __future__ import annotations

from fabricamp.profilers.advanced import AdvancedProfiler
from fabricamp.profilers.base import PassThroughProfiler, profiler_from
from fabricamp.profilers.memory import MemoryProfiler
from fabricamp.profilers.profiler import Profiler
from fabricamp.profilers.pytorch import PyTorchProfiler
from fabricamp.profilers.simple import SimpleProfiler

__all__ = [
    "AdvancedProfiler",
    "MemoryProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "profiler_from",
]


def __getattr__(name: str) -> object:
    from fabricamp.arguments.not_offered import part_of

    return part_of(__name__, name, __all__)
