"""Numbers on their way from the host to a device, in a step and while a CUDA graph is captured.

A capture must hold no upload.  Each replay would do it again: it would put back the learning rate of the capture, or write the
graph's addresses over those of the eager steps between.  So what is uploaded meanwhile goes there at once, on a stream beside the
capture, into memory that is not of the graph's pool: a replay writes other tensors to the same place of that.
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
_STREAMS: Final = 64  # more than there are in torch's pool, from which they come in turn


def is_capturing(device: torch.device) -> bool:
    """Returns whether what is launched on ``device`` now is captured into a CUDA graph."""
    captures = CAPTURES.get(device.type)
    return captures is not None and captures.under_way()


def lasting_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns uninitialised memory that no replay of a graph writes to by itself."""
    with _beside_capture(device):
        return torch.empty(shape, dtype=dtype, device=device)


def lasting_like(tensor: Tensor) -> Tensor:
    """Returns uninitialised memory like ``tensor`` that no replay of a graph writes to by itself."""
    with _beside_capture(tensor.device):
        return torch.empty_like(tensor)


def upload(values: np.ndarray, to: Tensor) -> None:
    """Writes ``values`` into ``to``, which is contiguous: without waiting, or during a capture at once."""
    source = torch.from_numpy(values)
    if is_capturing(to.device):
        with _beside_capture(to.device):
            to.copy_(source)  # a replay may come at once, and would not wait for the stream that this is on
    elif to.device.type == "cuda":
        to.copy_(source.pin_memory(), non_blocking=True)  # torch keeps the pinned memory until the copy is done
    else:
        to.copy_(source)


@contextlib.contextmanager
def _beside_capture(device: torch.device) -> Iterator[None]:
    """Lets what is launched run now, also during a capture."""
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
    """Lets this thread allocate and wait although a stream is being captured, as torch's allocator does for a graph's pool.

    ``torch.cuda.graph`` captures in the mode "global", in which a thread may not; a thread's own mode comes before that (CUDA
    Driver API, cuThreadExchangeStreamCaptureMode).
    """
    mode = ctypes.c_int(_RELAXED)
    _exchange_mode(mode)
    try:
        yield
    finally:
        _exchange_mode(mode)


def _exchange_mode(mode: ctypes.c_int) -> None:
    """Makes ``mode`` this thread's, and puts the one before into it."""
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
    """How a kind of device captures: whether it does so now, and what lets launches run beside a capture."""

    under_way: Callable[[], bool]
    beside: Callable[[torch.device], contextlib.AbstractContextManager[None]]


CAPTURES: dict[str, Captures] = {"cuda": Captures(current_stream_is_capturing, _another_stream)}
"""By device type; the tests add one for "cpu"."""
