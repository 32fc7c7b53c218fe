"""The profiler of a run: ``Trainer(profiler=...)``, or :class:`PassThroughProfiler` without that argument."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from fabricamp.arguments.not_offered import lightnings
from fabricamp.errors import ConfigError, meant, nearest, without_address
from fabricamp.profilers.advanced import AdvancedProfiler
from fabricamp.profilers.memory import MemoryProfiler
from fabricamp.profilers.profiler import Profiler
from fabricamp.profilers.pytorch import PyTorchProfiler
from fabricamp.profilers.simple import SimpleProfiler

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_NAMES = ("simple", "advanced", "pytorch", "memory")


def profiler_from(value: Any, device_type: str) -> Profiler:
    """Returns the profiler for a name, an object or None; raises :class:`ConfigError` for anything else.

    A MemoryProfiler is refused on other devices than a GPU, where it would write nothing.
    """
    profiler = _chosen(value)
    if isinstance(profiler, MemoryProfiler) and device_type != "cuda":
        raise ConfigError(
            f"profiler: MemoryProfiler records the memory of a GPU, and this Trainer runs on {device_type!r}; give "
            "accelerator='gpu', or PyTorchProfiler(profile_memory=True), whose table has the CPU's"
        )
    return profiler


def _chosen(value: Any) -> Profiler:
    if value is None:
        return PassThroughProfiler()
    if isinstance(value, Profiler):
        return value
    if value == "simple":
        return SimpleProfiler()
    if value == "advanced":
        return AdvancedProfiler()
    if value == "memory":
        return MemoryProfiler()
    if value == "pytorch":
        return PyTorchProfiler()
    if words := lightnings(value):
        raise ConfigError(f"profiler: {words}")
    if words := meant("profiler", value):
        raise ConfigError(f"profiler={value!r} is not known{words}")
    hint = nearest(value, _NAMES) if isinstance(value, str) else ""
    raise ConfigError(
        f"profiler={without_address(value)} is not known{hint} (known: 'simple', 'advanced', 'pytorch', 'memory', or an object "
        "that derives from fabricamp.profilers.Profiler)"
    )


class PassThroughProfiler(Profiler):
    """Records nothing; the loops do not call it.

    Example:
        >>> with PassThroughProfiler().profile("loss"):
        ...     pass
    """

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]  # also a context manager of str
        """Returns a context that records nothing."""
        return contextlib.nullcontext(action_name)
