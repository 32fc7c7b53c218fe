"""Host memory that a thread takes and pins in pieces while training begins: pinning it at once would hold a step up for seconds."""

from __future__ import annotations

import logging
import mmap
import threading
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from fabricamp._utils.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOG = logging.getLogger("fabricamp")

PIECE: Final = 256 << 20
"""Bytes that are touched and pinned at a time; pieces end at multiples of it, as addresses."""

_PAGE: Final = mmap.PAGESIZE
_ALIGNED: Final = 64  # bytes


class PinnedMemory:
    """``size`` bytes at one place, handed out from its begin; a tensor may be larger than a piece.

    ``pin(address, size)`` pins a piece, and returns why it could not; what is asked for later is then not there.
    """

    def __init__(self, size: int, pin: Callable[[int, int], str], unpin: Callable[[int], object]) -> None:
        self._region = mmap.mmap(-1, max(size, 1))  # its pages are taken at their first touch
        self._bytes = torch.frombuffer(self._region, dtype=torch.uint8)
        self._size = size
        self._pin = pin
        self._unpin = unpin
        self._closed = False
        self._taken = 0
        self._ready = 0
        self._changed = threading.Condition()
        self._problem = ""
        self._thread = start_thread(
            self._run, name="fabricamp-pinning", what="pinned memory", otherwise="save with ModelCheckpoint"
        )

    def take(self, size: int) -> torch.UntypedStorage | None:
        """Returns the next ``size`` bytes, once they are pinned; None if there are not so many."""
        start = self._taken
        stop = start + size
        if stop > self._size:
            return None
        with self._changed:
            if self._ready < stop and not self._problem:
                _LOG.info(
                    "The first checkpoint waits until its host memory is pinned: %.1f of %.1f GiB are",
                    self._ready / 2**30, self._size / 2**30,
                )  # fmt: skip
            self._changed.wait_for(lambda: self._ready >= stop or self._problem)
            if self._ready < stop:
                return None
        self._taken = -(-stop // _ALIGNED) * _ALIGNED
        storage = self._bytes.untyped_storage()[start:stop]
        assert isinstance(storage, torch.UntypedStorage)
        return storage

    def close(self) -> None:
        """Unpins the memory, which nobody uses any more."""
        self._closed = True
        self._thread.join()
        base = self._bytes.data_ptr()
        for start, _ in pieces(base, self._ready):
            self._unpin(base + start)

    def _run(self) -> None:
        base = self._bytes.data_ptr()
        for start, stop in pieces(base, self._size):
            if self._closed:
                return
            self._bytes[start:stop:_PAGE] = 0
            problem = self._pin(base + start, stop - start)
            if problem:
                _LOG.warning("Host memory for checkpoints cannot be pinned (%s): the first save takes it", problem)
            with self._changed:
                self._problem = problem
                self._ready = start if problem else stop
                self._changed.notify_all()
            if problem:
                return


def pieces(address: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of the pieces of ``size`` bytes at ``address``: no copy by the driver may cross their borders."""
    start = 0
    while start < size:
        stop = min(size, (address + start) // PIECE * PIECE + PIECE - address)
        yield start, stop
        start = stop


def copy_in_pieces(target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
    """Queues a copy from a GPU into pinned memory, which may be of several pieces."""
    here = _bytes_of(target)
    there = _bytes_of(source)
    for start, stop in pieces(target.data_ptr(), target.nbytes()):
        here[start:stop].copy_(there[start:stop], non_blocking=True)


def pin_by_cuda(address: int, size: int) -> str:
    """Pins host memory for all GPUs; returns why it could not."""
    error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    return "" if int(error) == 0 else str(error)


def unpin_by_cuda(address: int) -> None:
    """Undoes :func:`pin_by_cuda`."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
