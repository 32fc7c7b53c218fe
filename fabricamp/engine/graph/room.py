"""Whether there is room for one more graph, asked before its capture: a graph keeps its memory, beside that of eager steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import torch

from fabricamp.engine.graph.batches import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from fabricamp.state import RunState

_GIB: Final = 2**30
Result = TypeVar("Result")


class NoRoomError(NotCapturableError):
    """Why a capture would not fit: what it needs, what is free, and what to change."""


class Room:
    """What eager steps of a session take of a device's memory, and what a capture would leave of it.

    A graph holds what a step has allocated at most at a time.  ``required``: the first shape gets its graph where that alone is
    free; elsewhere as much as an eager step takes has to be free beside it, for short batches and other shapes.
    """

    def __init__(self, device: torch.device, state: RunState, *, required: bool) -> None:
        self._device = device
        self._state = state
        self._required = required
        self._takes: dict[Hashable, int] = {}

    def measured(self, key: Hashable, call: Callable[[], Result]) -> Result:
        """Returns what ``call``, an eager step of the kind ``key``, does; notes what it has allocated at most."""
        state, device = self._state, self._device
        state.peak_bytes = max(state.peak_bytes, torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        self._takes[key] = torch.cuda.max_memory_allocated(device) - before
        return result

    def takes(self, key: Hashable) -> int:
        """How many bytes an eager step of this kind takes; 0 where none was measured."""
        return self._takes.get(key, 0)

    def has(self, size: int) -> bool:
        """Whether so many bytes are free."""
        return size < free_memory(self._device)

    def check(self, key: Hashable, *, kept: int = 0, shared: int = 0, shapes: int = 0) -> None:
        """Raises :class:`NoRoomError` where a graph of ``key`` would not fit.

        ``kept``: what of a capture is not freed within it.  ``shared``: what other graphs have that it may use.  ``shapes``: how
        many other shapes are captured.
        """
        needed = max(self.takes(key) + kept - shared, 0)
        beside = 0 if self._required and not shapes else max(self._takes.values(), default=0)
        free = free_memory(self._device)
        if needed + beside <= free:
            return
        more = f" and steps that run eagerly beside it {_amount(beside)}" if beside else ""
        fewer = f", or CudaGraph(shapes={shapes})" if shapes else ""
        raise NoRoomError(
            f"a graph of the step would take {_amount(needed)}{more}, and {_amount(free)} of {self._device} are free; give a "
            f"smaller batch{fewer}"
        )


def free_memory(device: torch.device) -> int:
    """Returns how many bytes can still be allocated, those that torch's allocator keeps for later among them: they are freed."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.memory.get_per_process_memory_fraction(device))
    return max(min(free, allowed - torch.cuda.memory_reserved(device)), 0)


def _amount(size: int) -> str:
    return f"{size:,} bytes ({size / _GIB:.2f} GiB)"
