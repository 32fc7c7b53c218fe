"""Writes checkpoints in the background: copies the state to host memory, where training cannot change it, and writes in a thread.

:class:`HostCopy` copies, :class:`BackgroundWriter` copies and writes, and :class:`StagedFolder` is one rank's part of a folder of
shards that all ranks write in the background.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fabricamp._utils.threads import start_thread
from fabricamp.checkpoint.pinned_memory import PinnedMemory, copy_in_pieces, pin_by_cuda, unpin_by_cuda
from fabricamp.checkpoint.plain import tensors_in
from fabricamp.errors import CheckpointError, NoThreadError
from fabricamp.ops.shards import local
from fabricamp.ops.write_gate import WRITES
from fabricamp.torch_private import with_part

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.strategies.process_group import SideProcessGroup


MARGIN: Final = 1 << 30
"""Bytes of a device that copies of a save leave free."""

SMALL: Final = 1 << 16
"""Tensors with fewer bytes are copied at once, whoever writes them."""


class Held(NamedTuple):
    """What only writers that ask the gate change: a save may read it in place for a while."""

    tensors: Sequence[Tensor] = ()
    """Strided ones."""
    reads_later: bool = True
    """Whether the gate sees every writer; else only copies on the device are made of them."""

    def addresses(self) -> frozenset[int]:
        """Returns the addresses of their storages."""
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in self.tensors)

    def versions(self) -> int:
        """Returns a number that changes if torch counts a write to one of them."""
        return sum(tensor._version for tensor in self.tensors if not tensor.is_inference())


class HostCopy:
    """Copies a checkpoint to host memory, pinned for GPU tensors; each copy reuses the memory of the previous one.

    Copies from a GPU are queued on the training stream: the host does not wait, and later changes of the weights run after them.
    What is :class:`Held` is cloned on its device as far as that has free memory; the clones, and the rest where it is, are copied
    beside the training that follows: on a stream of their own, or of host memory by :meth:`wait`.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._events: list[torch.cuda.Event] = []
        self._events_of_rest: list[torch.cuda.Event] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._rest: list[_Later] = []
        self._clones: list[_Later] = []
        self._rest_is_read = threading.Event()
        self._memory: PinnedMemory | None = None
        self._reading: Reading | None = None

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
        self._rest = []
        if memory is not None:
            memory.close()

    def take(self, state: StateDict, held: Held = Held()) -> StateDict:  # noqa: B008 - immutable
        """Returns a copy of ``state`` with every tensor on the host; shared memory and views are preserved.

        The values have arrived after :meth:`wait`; until :data:`~fabricamp.ops.write_gate.WRITES` was opened, nobody may write what
        is ``held``.  Raises :class:`CheckpointError` for values that a checkpoint cannot hold.
        """
        copies = _Copies(self._buffers, held, self._memory)
        copied = copies.copy_state(state)
        self._buffers = copies.used
        self._rest = copies.rest
        self._clones = copies.clones
        self._rest_is_read = threading.Event()
        self._events = []
        self._events_of_rest = []
        self._reading = None
        for device in copies.devices:
            self._events += self._queue(device)
        if self._rest:
            addresses = [later.source.data_ptr() for later in self._rest]
            in_host_memory = any(later.source.device.type == "cpu" for later in self._rest)
            is_read = self._rest_is_read if in_host_memory else None
            let_write = functools.partial(_let_write, self._events_of_rest, is_read)
            self._reading = Reading(held)
            WRITES.close(functools.partial(self._reading.end, let_write), addresses)
        return copied

    def _queue(self, device: torch.device) -> list[torch.cuda.Event]:
        """Queues the later copies from a GPU on a stream of their own; returns the events after which all has arrived."""
        training = torch.cuda.current_stream(device)
        now = torch.cuda.Event(blocking=True)
        now.record(training)
        rest = [later for later in self._rest if later.source.device == device]
        clones = [later for later in self._clones if later.source.device == device]
        if not rest and not clones:
            return [now]
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_event(now)
        events = [now]
        with torch.cuda.stream(stream):
            for part in (rest, clones):
                for later in part:
                    later.copy(non_blocking=True)
                after = torch.cuda.Event(blocking=True)
                after.record(stream)
                events.append(after)
        if rest:
            self._events_of_rest.append(events[1])
        return events

    def wait(self) -> None:
        """Waits until the last copy of :meth:`take` has arrived, and copies what is in host memory; called from any thread."""
        try:
            for later in self._rest:
                if later.source.device.type == "cpu":
                    later.copy()
            for event in self._events_of_rest:
                event.synchronize()
            if self._reading is not None:
                self._reading.note_read()
        finally:
            self._rest_is_read.set()  # a writer would wait forever
        for later in self._clones:
            if later.source.device.type == "cpu":
                later.copy()
        for event in self._events:
            event.synchronize()
        self._clones = []  # gives the device its memory back
        if self._reading is not None and self._reading.is_torn:
            raise CheckpointError(
                "weights or optimizer states were written between two updates by code that a save in the background cannot hold up "
                "(a hook of autograd, compiled code, a kernel of yours), while the checkpoint was copied; use ModelCheckpoint"
            )


class Reading:
    """Tells whether something has written what is held before it was read, and before the gate was opened."""

    def __init__(self, held: Held) -> None:
        self.is_torn = False
        self._held = held
        self._versions = held.versions()
        self._has_ended = False

    def end(self, let_write: Callable[[], None]) -> None:
        """Lets the first writer wait, which the gate has seen."""
        if not self._has_ended:
            self.is_torn = self._held.versions() != self._versions
            self._has_ended = True
        let_write()

    def note_read(self) -> None:
        """Looks for writers that the gate has not seen by now; called from any thread, when all has been read."""
        versions = self._held.versions()
        if not self._has_ended:  # else those that the gate has seen may have written
            self.is_torn = versions != self._versions
            self._has_ended = True


def _let_write(events: list[torch.cuda.Event], is_read: threading.Event | None) -> None:
    """Lets the current stream wait for ``events``; the host waits only for what is read in its own memory."""
    for event in events:
        event.wait()
    if is_read is not None:
        is_read.wait()


class _Later(NamedTuple):
    """A copy that is made beside the training that follows."""

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

    def __init__(self, buffers: list[_Buffer] | None, held: Held = Held(), own: PinnedMemory | None = None) -> None:  # noqa: B008 - immutable
        self._buffers = buffers
        self._own = own
        self._held = held
        self._addresses = held.addresses()
        self._free: dict[torch.device, int] = {}
        self.rest: list[_Later] = []
        """What is read where it is."""
        self.clones: list[_Later] = []
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
        if not self._is_left_for_later(buffer.memory, storage):
            _Later(buffer.memory, storage).copy(non_blocking=pinned)
        self.used.append(buffer)
        if pinned and storage.device not in self.devices:
            self.devices.append(storage.device)
        return buffer.memory

    def _is_left_for_later(self, memory: torch.UntypedStorage, storage: torch.UntypedStorage) -> bool:
        """Returns whether the copy into ``memory`` is made later: from a clone on the device, or from where it is."""
        if storage.data_ptr() not in self._addresses or storage.nbytes() < SMALL:
            return False
        device = storage.device
        free = self._free.setdefault(device, free_memory(device))
        if storage.nbytes() <= free:
            self._free[device] = free - storage.nbytes()
            self.clones.append(_Later(memory, storage.clone()))
            return True
        if self._held.reads_later:
            self.rest.append(_Later(memory, storage))
        return self._held.reads_later


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

    def start(
        self,
        state: StateDict,
        write: Callable[[StateDict], None],
        held: Held = Held(),  # noqa: B008 - immutable
    ) -> None:
        """Copies ``state`` and calls ``write`` with the copy in the thread; call :meth:`wait` for the previous write first."""
        self.write_copy(self.take(state, held), write)

    def take(self, state: StateDict, held: Held = Held()) -> StateDict:  # noqa: B008 - immutable
        """Returns the copy of ``state`` for :meth:`write_copy`; raises :class:`CheckpointError` if host memory is too small.

        What is ``held`` may be read while :meth:`write_copy` begins.
        """
        assert self._thread is None, "at most one write is in flight"
        try:
            return self._copy.take(state, held)
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
            self._copy.wait()  # else writers would wait for the thread
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
