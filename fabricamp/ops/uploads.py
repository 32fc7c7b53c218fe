"""Uploads of numbers from the host to a device, in eager steps and while a CUDA graph is captured.

A capture must not contain an upload.  Each replay would repeat it: it would restore the learning rate of the capture, or overwrite
the addresses of eager steps with those of the graph.  During a capture an upload therefore runs at once, on a stream that is not
captured, into memory outside of the graph's pool.  Memory of the pool will not do: a replay writes other tensors to the same place.

:func:`pinned_for_kernels` is for the other direction: host memory that kernels write to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fabricamp.torch_private import current_stream_is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_STREAMS: Final = 64  # more than torch's pool has; new streams are taken from the pool in turn


def is_capturing(device: torch.device) -> bool:
    """Returns whether launches on ``device`` are being captured into a CUDA graph now."""
    captures = CAPTURES.get(device.type)
    return captures is not None and captures.under_way()


def lasting_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns uninitialised memory outside of a graph's pool: no replay reuses it for other tensors."""
    with _beside_capture(device):
        return torch.empty(shape, dtype=dtype, device=device)


def lasting_like(tensor: Tensor) -> Tensor:
    """Returns uninitialised memory like ``tensor``, outside of a graph's pool: no replay reuses it for other tensors."""
    with _beside_capture(tensor.device):
        return torch.empty_like(tensor)


def upload(values: np.ndarray, to: Tensor) -> None:
    """Writes ``values`` into the contiguous tensor ``to``: without waiting, but synchronously during a capture."""
    source = torch.from_numpy(values)
    if is_capturing(to.device):
        with _beside_capture(to.device):
            to.copy_(source)  # a replay may follow at once, and would not wait for this stream
    elif to.device.type == "cuda":
        to.copy_(source.pin_memory(), non_blocking=True)  # torch keeps the pinned memory until the copy is done
    else:
        to.copy_(source)


_never_freed: Final[list[Tensor]] = []


def pinned_for_kernels(*size: int, dtype: torch.dtype) -> Tensor:
    """Returns zeroed pinned memory that is never freed; meant for a few bytes.

    torch reuses a freed pinned block at once, unless one of torch's own copies still uses it.  torch does not know about kernels:
    a kernel that still runs when its owner is dropped (a fit that raised) would write into memory reused for someone's batch.
    """
    pinned = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=True)
    _never_freed.append(pinned)
    return pinned


@contextlib.contextmanager
def _beside_capture(device: torch.device) -> Iterator[None]:
    """Makes launches within it run immediately, also during a capture."""
    if is_capturing(device):
        with CAPTURES[device.type].beside(device):
            yield
    else:
        yield


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Lets this thread allocate and wait while a stream is being captured, as torch's allocator does for a graph's pool.

    ``torch.cuda.graph`` captures in the mode "global", which forbids both to every thread; a thread's own mode takes precedence
    (CUDA Driver API, cuThreadExchangeStreamCaptureMode).
    """
    mode = ctypes.c_int(_RELAXED)
    _exchange_mode(mode)
    try:
        yield
    finally:
        _exchange_mode(mode)


def _exchange_mode(mode: ctypes.c_int) -> None:
    """Sets this thread's capture mode to ``mode``, and stores the previous mode in ``mode``."""
    status = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with CUDA error {status}")


@contextlib.contextmanager
def _another_stream(device: torch.device) -> Iterator[None]:
    for _ in range(_STREAMS):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            if not current_stream_is_capturing():
                with _relaxed_capture():
                    yield
                return
    raise RuntimeError("every stream of torch's pool is being captured")


class Captures(NamedTuple):
    """How a device type captures: ``under_way()`` says whether a capture is running, ``beside`` runs launches outside of it."""

    under_way: Callable[[], bool]
    beside: Callable[[torch.device], contextlib.AbstractContextManager[None]]


CAPTURES: dict[str, Captures] = {"cuda": Captures(current_stream_is_capturing, _another_stream)}
"""By device type; the tests add one for "cpu"."""
