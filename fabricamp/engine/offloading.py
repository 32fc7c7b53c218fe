"""Tensors that blocks save for backward, in host memory until backward needs them (``Activations(offload=...)``).

:class:`Offloading` has the hooks of saved tensors, and the order of copies: while a block runs, what it saves is copied out on a
side stream, and let go of one block later; while backward runs a block, what the block before it needs is copied back.  torch's
``save_on_cpu`` copies on the stream of the step, which waits for each copy.  :class:`HostMemory` is taken in the first step and
used again in each later one.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fabricamp.checkpoint.pinned_memory import pin_by_cuda, unpin_by_cuda
from fabricamp.engine.out_of_memory import shown
from fabricamp.errors import ConfigError
from fabricamp.strategies.fsdp import memory_of
from fabricamp.torch_private import (
    call_at_end_of_backward,
    current_backward,
    current_stream_is_capturing,
    storage_key,
    stream_in_use,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_BYTES: Final = 64 << 10
"""Smaller tensors stay where they are: a copy costs the host more than it saves."""
_SHARE_OF_HOST: Final = 0.8


class Offloading:
    """Moves a share of what blocks save, in bytes, from ``device`` to host memory and back; on a CPU by plain copies.

    A share of a pass is the same tensors in each pass of the same shapes: they are taken in the order in which they are saved.
    """

    def __init__(
        self, share: float, device: torch.device, *, processes: int, compiles: bool, say: Callable[[str], None]
    ) -> None:
        self._share = share
        self._device = device
        self._say: Callable[[str], None] | None = say
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = HostMemory(
            pinned=self._stream is not None, most=int(_SHARE_OF_HOST * memory_of(_CPU, processes))
        )
        hooks = (self._pack, self._unpack)
        if compiles:  # else torch would trace them, where a block's code has graph breaks
            hooks = (torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack))
        self._hooks = saved_tensors_hooks(*hooks)
        self._pass = _Pass()
        self._block: _Block | None = None
        """The call of a block that runs."""
        self._stay: set[int] = set()
        """The storages of its parameters and buffers."""
        self._leaving: _Block | None = None
        """The call before it, whose copies may still be under way."""
        self._reached: _Block | None = None
        """The block whose backward runs."""
        self._loading: dict[int, _Piece] = {}
        """What is on its way back, until the step's stream has waited for it."""
        self._task = -1

    # -- forward -----------------------------------------------------------------------------------------------------------------

    def run(self, block: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns ``call(*args, **kwargs)``, a call of ``block``; what it saves for backward may be moved."""
        if self._block is not None:
            return call(*args, **kwargs)
        capturing = self._stream is not None and current_stream_is_capturing()
        if self._pass.begun or self._pass.capturing != capturing:
            self._begin_pass(capturing=capturing)
        self._block = self._pass.add_block()
        # Wrapper classes have no storage of their own, and are not moved either.
        self._stay = {storage_key(one) for one in (*block.parameters(), *block.buffers()) if type(one) in _PLAIN}
        try:
            with self._hooks:
                output = call(*args, **kwargs)
            self._end_block(self._block)
        except BaseException:
            self._begin_pass(capturing=capturing)
            raise
        finally:
            self._block = None
        return output

    def _begin_pass(self, *, capturing: bool) -> None:
        # Memory that is let go of while its copy is under way may be overwritten, in a copy that nobody reads.
        self._leaving = None
        self._pass = _Pass(capturing=capturing)
        if self._loading and not capturing:  # of a backward that an exception has ended
            self._end_backward()

    def _end_block(self, block: _Block) -> None:
        """Lets go of what the block before has saved: the step's stream waits for its copies, and may then use its memory."""
        leaving, self._leaving = self._leaving, block
        if self._stream is not None and block.held:
            block.left = self._stream.record_event()
        if leaving is None:
            return
        if leaving.left is not None:
            stream_in_use(self._device).wait_event(leaving.left)
        for piece in leaving.held:
            piece.let_go()
        leaving.held.clear()

    def _pack(self, tensor: Tensor) -> _Saved:
        block = self._block
        assert block is not None, "the hooks are on within a block alone"
        piece = self._piece_of(block, tensor) if self._is_movable(tensor) else None
        if piece is None:
            return _Saved(block, None, tensor.detach(), tensor._version)
        return _Saved(block, piece, _Layout(tensor), piece.version)

    def _is_movable(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= LEAST_BYTES
            and not tensor.is_conj()
            and not tensor.is_neg()
            and storage_key(tensor) not in self._stay
        )

    def _piece_of(self, block: _Block, tensor: Tensor) -> _Piece | None:
        """Returns the copy of the memory of ``tensor``, which other saved tensors may have in common; None if it stays."""
        key = storage_key(tensor)
        known = block.of.seen.get(key)
        # The address is not used again while a weak reference to the storage is kept.
        if known is not None and not known.storage.expired() and known.version == tensor._version:
            if known.piece is None:
                return None
            if (piece := known.piece()) is not None:
                return piece
        size = tensor.untyped_storage().nbytes()
        taken = block.of.takes(size, self._share)
        piece = self._copied_out(block, tensor, size) if taken else None
        block.of.seen[key] = _Known(tensor, piece)
        return piece

    def _copied_out(self, block: _Block, tensor: Tensor, size: int) -> _Piece:
        piece = _Piece(tensor, self._memory, self._memory.take(size))
        assert piece.flat is not None
        if self._stream is None:
            piece.host.copy_(piece.flat)
        else:
            self._stream.wait_stream(stream_in_use(self._device))
            with torch.cuda.stream(self._stream):
                piece.host.copy_(piece.flat, non_blocking=True)
        block.held.append(piece)
        block.pieces.append(weakref.ref(piece))
        return piece

    # -- backward ----------------------------------------------------------------------------------------------------------------

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.block is not self._reached:
            self._reach(saved.block)
        piece = saved.piece
        if piece is None:
            kept = saved.tensor
            assert isinstance(kept, Tensor)
            if kept._version != saved.version:
                raise RuntimeError(_changed_in_place(kept.shape, kept.dtype))
            return kept
        if piece.flat is None:
            self._load([piece])
        if piece.ready is not None:
            stream_in_use(self._device).wait_event(piece.ready)
            piece.ready = None
        self._loading.pop(id(piece), None)
        assert isinstance(saved.tensor, _Layout)
        assert piece.flat is not None
        if piece.is_spoilt():
            raise RuntimeError(_changed_in_place(saved.tensor.shape, saved.tensor.dtype))
        return saved.tensor.view_of(piece.flat)

    def _reach(self, block: _Block) -> None:
        """Notes that backward has come to ``block``; copies back what it and the block before it need."""
        self._reached = block
        block.of.begun = True
        if (task := current_backward()) not in (-1, self._task):
            self._task = task
            call_at_end_of_backward(self._end_backward)
        if self._leaving is not None:
            self._leaving.held.clear()  # it is used as it is: autograd alone keeps it now
            self._leaving = None
        self._load([piece for one in block.with_the_one_before() for piece in one.away()])

    def _load(self, pieces: list[_Piece]) -> None:
        if not pieces:
            return
        for piece in pieces:  # memory of the step's stream, which may still be used by what was launched before
            piece.flat = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
        if self._stream is None:
            for piece in pieces:
                piece.flat.copy_(piece.host)  # type: ignore[union-attr]  # made above
            return
        self._stream.wait_stream(stream_in_use(self._device))
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                piece.flat.copy_(piece.host, non_blocking=True)  # type: ignore[union-attr]
                piece.ready = self._stream.record_event()
                self._loading[id(piece)] = piece

    def _end_backward(self) -> None:
        """Joins the side stream to the step's, and forgets the pass."""
        if self._stream is not None:
            stream_in_use(self._device).wait_stream(self._stream)
        for piece in self._loading.values():
            piece.ready = None
        self._loading.clear()
        reached, self._reached, self._task = self._reached, None, -1
        if self._say is not None and reached is not None:
            kind = "pinned host memory" if self._stream is not None else "host memory of its own"
            found = reached.of
            self._say(
                f"activations: {shown(found.moved)} of {shown(found.total)} that blocks keep of a micro-batch wait in {kind}"
            )
            self._say = None

    def close(self) -> None:
        """Frees the host memory, which nothing uses any more."""
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):  # of the error that has ended the run: nothing is copied after it
                self._stream.synchronize()
        self._memory.close()


_CPU: Final = torch.device("cpu")
_PLAIN: Final = (Tensor, nn.Parameter)


def _changed_in_place(shape: torch.Size, dtype: torch.dtype) -> str:
    return (
        f"a tensor of shape {tuple(shape)} and {dtype}, which backward needs, was changed in place after a block of "
        "Activations(offload=...) had saved it; change a copy of it"
    )


# -- a pass and its blocks ---------------------------------------------------------------------------------------------------------


class _Pass:
    """The calls of blocks up to a backward."""

    def __init__(self, *, capturing: bool = False) -> None:
        self.capturing = capturing
        """Whether it is one of a CUDA graph: events of another one cannot be waited for."""
        self.blocks: list[_Block] = []
        self.begun = False
        """Whether backward has reached it."""
        self.seen: dict[int, _Known] = {}
        self.total = 0
        self.moved = 0
        self._owed = 0.0

    def add_block(self) -> _Block:
        block = _Block(self, len(self.blocks))
        self.blocks.append(block)
        return block

    def takes(self, size: int, share: float) -> bool:
        """Returns whether the next tensor, of ``size`` bytes, is one of the share: what is moved is as near to it as can be."""
        self.total += size
        self._owed += size * share
        if 2 * self._owed < size:
            return False
        self._owed -= size
        self.moved += size
        return True


class _Block:
    """One call of a block."""

    def __init__(self, of: _Pass, number: int) -> None:
        self.of = of
        self._number = number
        self.pieces: list[weakref.ref[_Piece]] = []
        self.held: list[_Piece] = []
        """Those whose memory on the device is still there."""
        self.left: torch.cuda.Event | None = None

    def with_the_one_before(self) -> list[_Block]:
        """Returns the block, and the nearest before it that has moved anything."""
        before = (one for one in reversed(self.of.blocks[: self._number]) if one.pieces)
        return [self, *filter(None, [next(before, None)])]

    def away(self) -> list[_Piece]:
        """Returns what is in host memory alone and may be needed."""
        return [piece for ref in self.pieces if (piece := ref()) is not None and piece.flat is None]


class _Known:
    """A storage that a pass has seen: its version, and its piece; no piece if it stays."""

    def __init__(self, tensor: Tensor, piece: _Piece | None) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.version = tensor._version
        self.piece = None if piece is None else weakref.ref(piece)


class _Saved:
    """What autograd keeps in the place of a tensor: the tensor itself, or its piece and layout."""

    __slots__ = ("block", "piece", "tensor", "version")

    def __init__(self, block: _Block, piece: _Piece | None, tensor: Tensor | _Layout, version: int) -> None:
        self.block = block
        self.piece = piece
        self.tensor = tensor
        self.version = version


class _Layout:
    """Where in its storage a tensor is, and how."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def view_of(self, flat: Tensor) -> Tensor:
        """Returns the tensor in the memory of ``flat``."""
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self.offset, self.shape, self.stride)


class _Piece:
    """The bytes of a storage in host memory, and on the device while they are there."""

    def __init__(self, tensor: Tensor, memory: HostMemory, slot: _Slot) -> None:
        self._memory = memory
        self._slot = slot
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.version = tensor._version
        self.host = slot.bytes[: self.size]
        self.flat: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.ready: torch.cuda.Event | None = None
        """The end of the copy back, if the step's stream has not waited for it."""
        self._source: Tensor | None = tensor.detach()
        self._spoilt = False

    def __del__(self) -> None:
        # Copies of the slot's next user follow on the same stream.
        self._memory.give(self._slot)

    def is_spoilt(self) -> bool:
        """Returns whether the tensor was changed in place while its bytes were being copied, or are still used."""
        return self._spoilt or (self._source is not None and self._source._version != self.version)

    def let_go(self) -> None:
        """Leaves the memory on the device to whoever else uses it."""
        self._spoilt = self.is_spoilt()
        self._source = None
        self.flat = None


# -- host memory -------------------------------------------------------------------------------------------------------------------


class _Slot:
    """A region of host memory, of pages of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class HostMemory:
    """Regions of host memory that are used again and again; ``most``: bytes that may be taken."""

    def __init__(self, *, pinned: bool, most: int) -> None:
        self._pinned = pinned
        self._most = most
        self._slots: list[_Slot] = []
        self._free: dict[int, list[_Slot]] = {}

    def take(self, size: int) -> _Slot:
        """Returns a region of ``size`` bytes or more; raises :class:`ConfigError` if the host has not so many."""
        size = _rounded(size)
        fitting = (
            size
            if self._free.get(size)
            else min((one for one in self._free if one > size and self._free[one]), default=0)
        )
        return self._free[fitting].pop() if fitting else self._new(size)

    def give(self, slot: _Slot) -> None:
        """Takes a region back."""
        self._free.setdefault(slot.size, []).append(slot)

    def _new(self, size: int) -> _Slot:
        taken = sum(slot.size for slot in self._slots)
        if taken + size > self._most:
            raise ConfigError(
                f"Activations(offload=...): {shown(taken + size)} of host memory are needed, and a process may take "
                f"{shown(self._most)}, which is four fifths of its share; give a smaller offload, save='inputs', or a smaller batch"
            )
        slot = _Slot(size)
        if self._pinned and (problem := pin_by_cuda(slot.bytes.data_ptr(), size)):
            raise ConfigError(
                f"Activations(offload=...): host memory cannot be pinned ({problem}) after {shown(taken)}; give a smaller offload"
            )
        self._slots.append(slot)
        return slot

    def close(self) -> None:
        """Unpins the regions."""
        for slot in self._slots if self._pinned else ():
            unpin_by_cuda(slot.bytes.data_ptr())
        self._slots.clear()
        self._free.clear()


def _rounded(size: int) -> int:
    """Returns ``size`` with its first four bits, rounded up, so that batches of many lengths share regions."""
    unit = 1 << max(size.bit_length() - 4, 12)
    return -(-size // unit) * unit
