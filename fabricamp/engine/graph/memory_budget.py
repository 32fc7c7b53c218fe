"""Checks before a capture that the graph's memory fits, with that of the eager steps that do not run in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from fabricamp.errors import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from fabricamp.state import RunState

_GIB: Final = 2**30
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
        self._eager_events: dict[Hashable, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        """Before and after the eager step that was measured."""

    def measured(self, key: Hashable, call: Callable[[], Result]) -> Result:
        """Returns the result of ``call``, an eager step with ``key``; records its peak of allocated memory, and its time."""
        device = self._device
        self._note_peak()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call()
        end.record()
        self._eager_bytes[key] = torch.cuda.max_memory_allocated(device) - before
        self._eager_events[key] = begin, end
        return result

    def _note_peak(self) -> None:
        """Keeps the peak so far, which torch forgets at a reset."""
        state = self._state
        state.peak_bytes = max(state.peak_bytes, torch.cuda.max_memory_allocated(self._device))

    @contextlib.contextmanager
    def left_out_of_peaks(self) -> Iterator[None]:
        """A context that leaves the memory which is taken and freed within it out of later peaks."""
        self._note_peak()
        try:
            yield
        finally:
            torch.cuda.reset_peak_memory_stats(self._device)

    def eager_bytes(self, key: Hashable) -> int:
        """Returns the bytes that an eager step with ``key`` takes; 0 if none was measured."""
        return self._eager_bytes.get(key, 0)

    def eager_seconds(self, key: Hashable) -> float:
        """Returns the seconds that an eager step with ``key`` takes, waiting for its end; 0 if none was measured."""
        events = self._eager_events.get(key)
        if events is None:
            return 0.0
        begin, end = events
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def free(self) -> int:
        """Returns the bytes that are free, torch's cache included, which is emptied."""
        return free_memory(self._device)

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


def free_memory(device: torch.device) -> int:
    """Empties the cache of torch's allocator and returns the number of bytes that can still be allocated."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.memory.get_per_process_memory_fraction(device))
    return max(min(free, allowed - torch.cuda.memory_reserved(device)), 0)


def _amount(size: int) -> str:
    return f"{size:,} bytes ({size / _GIB:.2f} GiB)"
