"""The memory of the graphs of a fit, which eager steps between two replays use too."""

from __future__ import annotations

import contextlib
import gc
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional as F

from fabricamp.torch_private import allocating_in_pool, segments_of_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_USE: Final = "active_allocated"
_IN_USE_BY_OTHER_STREAMS: Final = "active_pending_free"


class GraphPool:
    """A memory pool of torch's allocator in which the graphs of a fit are captured, all of them on ``stream``.

    Graphs run in turn and leave nothing in it that the next one needs, so all of them share one pool.  Eager steps would take as
    much memory again; within :meth:`lent` they allocate in the pool, before the first capture and between two replays.  A replay
    writes to the addresses of its capture without a look at what is allocated there now.  So before a replay or a further capture
    :meth:`reclaim` has to find out whether a tensor of such an eager step is still alive.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._streams = {stream.cuda_stream}
        """The streams whose memory the graphs use: that of the captures, and those that captured steps fork."""
        self._of_graphs: frozenset[tuple[int, int]] | None = None
        """Address and size of what was allocated before the pool was lent; None while it is not."""

    @cached_property
    def _pool(self) -> torch.cuda.MemPool:
        """Keeps the pool's memory while no graph does; made when it is first used, so that an ended run has none."""
        _make_workspaces(self._device)
        return torch.cuda.MemPool()

    @property
    def id(self) -> tuple[int, int]:
        """The pool's name for torch's allocator."""
        return self._pool.id

    def reserved(self) -> int:
        """Returns the bytes that the pool has reserved; waits for nothing."""
        return sum(segment["total_size"] for segment in self._segments())

    @property
    def is_lent(self) -> bool:
        """Whether an eager step has run in the pool since :meth:`reclaim`."""
        return self._of_graphs is not None

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """A context within which all allocations of the device's current stream are made in the pool, those of backward too."""
        if self._of_graphs is None:
            self._of_graphs = self._allocated()
        with allocating_in_pool(self._device, self.id):
            yield

    def begin(self) -> None:
        """Ends the loan before the first capture, which takes none of the memory that is allocated now."""
        self._of_graphs = None

    def reclaim(self) -> bool:
        """Returns whether all that was allocated while the pool was lent is freed, so that a replay may write there."""
        if self._of_graphs is None:
            return True
        left = self._allocated() - self._of_graphs
        if left:
            gc.collect()  # a tensor in a reference cycle is of no use to anybody
            left = self._allocated() - self._of_graphs
        if left:
            return False
        self._of_graphs = None
        return True

    def note_capture(self) -> None:
        """Notes the streams on which the capture that has just ended allocated memory."""
        self._streams.update(segment["stream"] for segment in self._segments())

    def _allocated(self) -> frozenset[tuple[int, int]]:
        """Returns address and size of the pool's allocated blocks, without those of streams that no graph uses."""
        segments = [segment for segment in self._segments() if segment["stream"] in self._streams]
        blocks = [block for segment in segments for block in segment["blocks"]]
        if any(block["state"] == _IN_USE_BY_OTHER_STREAMS for block in blocks):
            torch.cuda.synchronize(self._device)  # freed, and another stream may still read it
        return frozenset((block["address"], block["size"]) for block in blocks if block["state"] == _IN_USE)

    def _segments(self) -> list[dict[str, Any]]:
        return segments_of_pool(self.id)


class OwnPool:
    """Memory that is given back to the driver at its end, and is no part of what torch keeps for other tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    def empty(self, size: int) -> torch.Tensor:
        """Returns ``size`` bytes (uint8, 1-dim), which the caller drops before :meth:`release`."""
        within = contextlib.nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool, self._device)
        with within:
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def release(self) -> None:
        """Gives the memory back."""
        self._pool = None


def _make_workspaces(device: torch.device) -> None:
    """Multiplies two small matrices, forward and backward, so that cuBLAS has its workspaces for the current stream.

    torch allocates a workspace at the first product of a thread on a stream, and keeps it.  In the graphs' pool it would lie within
    a large block that the step frees, and what is left of that block would be too small for the step's next tensor of that size.
    """
    if torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        return  # torch refuses products then, and the step may have none
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        matrix = torch.ones(16, 16, dtype=torch.float32, device=device, requires_grad=True)
        bias = torch.ones(16, dtype=torch.float32, device=device)
        # With a bias the product is one of cuBLASLt, which may have a workspace of its own.
        F.linear(matrix, matrix, bias).sum().backward()
