"""Checks before a capture that the graph's memory fits, with that of the eager steps that do not run in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from fabricamp.errors import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fabricamp.state import RunState

_GIB: Final = 2**30
_MEMINFO: Final = Path("/proc/meminfo")
_CONTAINER_LIMITS: Final = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Limit and use of control groups, versions 2 and 1."""
Result = TypeVar("Result")


class GraphMemoryError(NotCapturableError):
    """A capture would not fit into memory: the bytes that it needs, those that are free, and what to change."""


class GraphMemoryBudget:
    """Measures the memory that eager steps of a session take, and checks whether a graph would fit beside them.

    A graph keeps the peak of a step's allocated memory.  With ``required``, the first shape is captured if its graph alone fits.
    Otherwise the memory of an eager step has to be free, too, for short batches and other shapes, unless these run in the graphs'
    memory.
    """

    def __init__(self, device: torch.device, state: RunState, *, required: bool) -> None:
        self._device = device
        self._state = state
        self._required = required
        self._eager_bytes: dict[Hashable, int] = {}

    def measured(self, key: Hashable, call: Callable[[], Result]) -> Result:
        """Returns the result of ``call``, an eager step with ``key``, and records its peak of allocated memory."""
        state = self._state
        device = self._device
        state.peak_bytes = max(state.peak_bytes, torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        self._eager_bytes[key] = torch.cuda.max_memory_allocated(device) - before
        return result

    def eager_bytes(self, key: Hashable) -> int:
        """Returns the bytes that an eager step with ``key`` takes; 0 if none was measured."""
        return self._eager_bytes.get(key, 0)

    def has_free(self, size: int) -> bool:
        """Whether more than ``size`` bytes are free."""
        return size < free_memory(self._device)

    def check(self, key: Hashable, *, kept: int = 0, shared: int = 0, shapes: int = 0, lends: bool = False) -> None:
        """Raises :class:`GraphMemoryError` if a graph of ``key`` would not fit.

        ``kept``: bytes that the capture allocates and does not free.  ``shared``: bytes of other graphs' memory that it may use.
        ``shapes``: the number of other captured shapes.  ``lends``: eager steps run in the graphs' memory, as far as it suffices.
        """
        needed = max(self.eager_bytes(key) + kept - shared, 0)
        beside_it = 0 if self._required and not shapes else max(self._eager_bytes.values(), default=0)
        if lends:
            beside_it = max(beside_it - needed - shared, 0)
        free = free_memory(self._device)
        if needed + beside_it <= free:
            return
        more = f" and steps that run eagerly beside it {_amount(beside_it)}" if beside_it else ""
        fewer = f", or CudaGraph(shapes={shapes})" if shapes else ""
        raise GraphMemoryError(
            f"a graph of the step would take {_amount(needed)}{more}, and {_amount(free)} of {self._device} are free; give a "
            f"smaller batch{fewer}"
        )


def free_host_memory() -> int:
    """Returns the bytes of the host's memory that are free, at most what the limit of a container leaves; 0 if it is unknown."""
    free = 0
    if _MEMINFO.exists():
        sizes = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        free = 1024 * int(sizes["MemAvailable"].split()[0])
    for limit, used in _CONTAINER_LIMITS:
        if limit.exists() and limit.read_text().strip() != "max":
            free = min(free, max(int(limit.read_text()) - int(used.read_text()), 0))
    return free


def free_memory(device: torch.device) -> int:
    """Empties the cache of torch's allocator and returns the number of bytes that can still be allocated."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.memory.get_per_process_memory_fraction(device))
    return max(min(free, allowed - torch.cuda.memory_reserved(device)), 0)


def _amount(size: int) -> str:
    return f"{size:,} bytes ({size / _GIB:.2f} GiB)"
