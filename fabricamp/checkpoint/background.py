"""Writes checkpoints in the background: copies the state to host memory, where training cannot change it, and writes in a thread.

:class:`HostCopy` copies, :class:`BackgroundWriter` copies and writes, and :class:`StagedFolder` is one rank's part of a folder of
shards that all ranks write in the background.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fabricamp._utils.threads import start_thread
from fabricamp.checkpoint.pinned_memory import PinnedMemory, copy_in_pieces, pin_by_cuda, unpin_by_cuda
from fabricamp.checkpoint.plain import tensors_in
from fabricamp.errors import CheckpointError, NoThreadError
from fabricamp.ops.shards import local
from fabricamp.torch_private import with_part

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.strategies.process_group import SideProcessGroup


MARGIN: Final = 1 << 30
"""Bytes of a device that copies of a save leave free."""

SMALL: Final = 1 << 16
"""Storages with fewer bytes are not cloned first."""


class HostCopy:
    """Copies a checkpoint to host memory, pinned for GPU tensors; each copy reuses the memory of the previous one.

    Copies from a GPU are queued on the training stream: the host does not wait, and later changes of the weights run after them.
    As far as the GPU has free memory they are clones there, which are copied to the host beside the training that follows, on a
    stream of their own.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._events: list[torch.cuda.Event] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._clones: list[_Later] = []
        self._memory: PinnedMemory | None = None

    def prepare(
        self,
        size: int,
        pin: Callable[[int, int], str] = pin_by_cuda,
        unpin: Callable[[int], object] = unpin_by_cuda,
    ) -> None:
        """Lets a thread take ``size`` bytes of host memory for the first :meth:`take`, which waits for what is not there yet."""
        self._memory = PinnedMemory(size, pin, unpin)

    def release(self) -> None:
        """Gives the host memory back; nobody uses a copy any more."""
        memory = self._memory
        self._memory = None
        self._buffers = []
        if memory is not None:
            memory.close()

    def take(self, state: StateDict) -> StateDict:
        """Returns a copy of ``state`` with every tensor on the host; shared memory and views are preserved.

        The values have arrived after :meth:`wait`.  Raises :class:`CheckpointError` for values that a checkpoint cannot hold.
        """
        copies = _Copies(self._buffers, self._memory)
        copied = copies.copy_state(state)
        self._buffers = copies.used
        self._clones = copies.clones
        self._events = [self._queue(device) for device in copies.devices]
        return copied

    def _queue(self, device: torch.device) -> torch.cuda.Event:
        """Queues the copies of a GPU's clones on a stream of their own; returns the event after which all has arrived."""
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(torch.cuda.current_stream(device))
        clones = [later for later in self._clones if later.source.device == device]
        if not clones:
            return arrived
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_event(arrived)
        with torch.cuda.stream(stream):
            for later in clones:
                later.copy(non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(stream)
        return arrived

    def wait(self) -> None:
        """Waits until the last copy of :meth:`take` has arrived; called from any thread."""
        for event in self._events:
            event.synchronize()
        self._clones = []  # gives the GPU its memory back


class _Later(NamedTuple):
    """A copy of a storage into host memory."""

    target: torch.UntypedStorage
    source: torch.UntypedStorage

    def copy(self, *, non_blocking: bool = False) -> None:
        """Copies all bytes."""
        if non_blocking:
            copy_in_pieces(self.target, self.source)
        else:
            self.target.copy_(self.source)


def free_memory(device: torch.device) -> int:
    """Returns how many bytes of ``device`` copies of a save may take: what its driver has free, less a margin; none of the host."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return max(free - MARGIN, 0)


def on_host(state: StateDict) -> StateDict:
    """Returns ``state`` with all tensors in host memory: the file then loads without a GPU.

    Tensors on the meta device, which stand for tensors stored elsewhere, are kept.
    """
    if all(tensor.device.type in ("cpu", "meta") for tensor in tensors_in(state, stored=True)):
        return state
    return _Copies(None).copy_state(state)


class _Buffer(NamedTuple):
    memory: torch.UntypedStorage
    pinned: bool


class _Copies:
    """One copy operation: copies each storage once, and recreates each tensor as a view of the copy."""

    def __init__(self, buffers: list[_Buffer] | None, own: PinnedMemory | None = None) -> None:
        self._buffers = buffers
        self._own = own
        self._free: dict[torch.device, int] = {}
        self.clones: list[_Later] = []
        """What is copied to the host later."""
        self._memory: dict[int, torch.UntypedStorage] = {}  # the copy of each storage
        self.used: list[_Buffer] = []
        self.devices: list[torch.device] = []

    @torch.no_grad()
    def copy_state(self, state: StateDict) -> StateDict:
        memo: dict[int, Any] = {
            id(tensor): tensor if tensor.is_meta else self._copy_tensor(tensor)
            for tensor in tensors_in(state, stored=True)
        }
        # Deep-copies the containers, because training continues to change them; the tensors come from the memo.
        return copy.deepcopy(state, memo)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        """Returns a copy of ``tensor`` as a view of its storage's copy, with its class (Parameter) and attributes."""
        values = tensor.detach()
        if values.layout is not torch.strided or values.is_quantized or values.is_conj() or values.is_neg():
            # Such a tensor cannot be rebuilt from storage, shape and strides alone.
            result = values.cpu().clone()
        else:
            memory = self._memory_of(values.untyped_storage())
            result = torch.empty(0, dtype=values.dtype, device="cpu")
            result.set_(memory, values.storage_offset(), values.shape, values.stride())
        if isinstance(tensor, nn.Parameter):
            result = nn.Parameter(result, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            result.requires_grad_()
        result.__dict__.update(tensor.__dict__)
        return result

    def _memory_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = storage.cpu() if self._buffers is None else self._copy_storage(storage, self._buffers)
        return self._memory[key]

    def _copy_storage(self, storage: torch.UntypedStorage, buffers: list[_Buffer]) -> torch.UntypedStorage:
        pinned = storage.device.type == "cuda"
        size = storage.nbytes()
        index = len(self.used)  # storages come in the same order each time
        buffer = buffers[index] if index < len(buffers) else None
        if buffer is None or buffer.pinned != pinned or buffer.memory.nbytes() != size:
            # Nothing has no place of its own there: torch.save would take it for a view of what comes next.
            memory = self._own.take(size) if self._own is not None and size else None
            if memory is None:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned).untyped_storage()
            buffer = _Buffer(memory, pinned)
        copied = _Later(buffer.memory, storage)
        clone = self._cloned(storage)
        if clone is None:
            copied.copy(non_blocking=pinned)
        else:
            self.clones.append(copied._replace(source=clone))
        self.used.append(buffer)
        if pinned and storage.device not in self.devices:
            self.devices.append(storage.device)
        return buffer.memory

    def _cloned(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Returns a clone of a large storage, if its GPU has memory for that."""
        size = storage.nbytes()
        device = storage.device
        free = self._free.setdefault(device, free_memory(device))
        if size < SMALL or size > free:
            return None
        self._free[device] = free - size
        clone: torch.UntypedStorage = storage.clone()
        return clone


class BackgroundWriter:
    """Writes one checkpoint at a time in a separate thread.

    ``finished`` is True from the end of a write, successful or not, until :meth:`wait` has reported it.
    """

    def __init__(self) -> None:
        self.finished = False
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        _started(lambda: None).join()  # if the system starts no thread, the run ends here, not at its first save

    def prepare(self, size: int) -> None:
        """Lets a thread pin host memory for a state of ``size`` bytes on GPUs."""
        self._copy.prepare(size)

    def release(self) -> None:
        """Gives host memory back, once the last write has ended."""
        if self._thread is None:
            self._copy.release()

    @property
    def failed(self) -> bool:
        """Whether a write has failed and :meth:`wait` has not reported it yet."""
        return self._failure is not None

    def start(self, state: StateDict, write: Callable[[StateDict], None]) -> None:
        """Copies ``state`` and calls ``write`` with the copy in the thread; call :meth:`wait` for the previous write first."""
        self.write_copy(self.take(state), write)

    def take(self, state: StateDict) -> StateDict:
        """Returns the copy of ``state`` for :meth:`write_copy`; raises :class:`CheckpointError` if host memory is too small."""
        assert self._thread is None, "at most one write is in flight"
        try:
            return self._copy.take(state)
        except CheckpointError:
            raise
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"there is no host memory for a copy of the state ({error!s:.200}); write with ModelCheckpoint instead"
            ) from error

    def wait_for_copy(self) -> None:
        """Waits until the values of the last :meth:`take` have arrived in host memory."""
        self._copy.wait()

    def write_copy(self, copied: StateDict, write: Callable[[StateDict], None]) -> None:
        """Calls ``write`` in the thread with the copy of :meth:`take`, once its values have arrived."""
        # A daemon thread, which Python does not join at exit: if nobody has waited by then, an error ended the run.
        try:
            self._thread = _started(self._run, copied, write)
        except NoThreadError as error:
            self._copy.wait()  # gives the GPU its memory back
            raise CheckpointError(f"the checkpoint was not written: {error}") from error

    def wait(self) -> None:
        """Waits for the write, if there is one; raises :class:`CheckpointError` if it failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self.finished = False
        failure = self._failure
        self._failure = None
        if isinstance(failure, CheckpointError):
            raise failure
        if failure is not None:
            raise CheckpointError(f"the checkpoint was not written: {type(failure).__name__}: {failure}") from failure

    def _run(self, copied: StateDict, write: Callable[[StateDict], None]) -> None:
        try:
            self._copy.wait()
            write(copied)
        except BaseException as error:  # noqa: BLE001 - raised by wait, in the thread that can handle it
            self._failure = error
        self.finished = True


def _started(target: Callable[..., object], *args: object) -> threading.Thread:
    return start_thread(
        target, *args, name="fabricamp-checkpoint", what="a write in the background", otherwise="use ModelCheckpoint"
    )


class StagedFolder:
    """One rank's part of a checkpoint folder, to be written in the background.

    ``own`` has this rank's shards of ``state``, on rank 0 also all other values; pass a copy of it to :meth:`write`.
    """

    def __init__(self, path: str, state: StateDict, side_group: SideProcessGroup) -> None:
        from fabricamp.checkpoint.shards import split

        unsharded, self._shards = split(state)
        self._path = path
        self._side_group = side_group
        self.step: int = state.get("global_step", 0)
        self.own = {
            "unsharded": unsharded if side_group.rank == 0 else {},
            "parts": [local(shard) for shard in self._shards.values()],
        }

    def write(self, copied: StateDict) -> None:
        """Writes the folder from a copy of ``own``; every rank calls it in a thread."""
        from fabricamp.checkpoint.folder import write_split

        pairs = zip(self._shards.items(), copied["parts"], strict=True)
        shards = {name: with_part(shard, part) for (name, shard), part in pairs}
        write_split(self._path, copied["unsharded"], shards, self._side_group)
