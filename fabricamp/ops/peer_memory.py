"""Memory that every rank of a group can write to: kernels exchange their statistics through it, and FSDP its weights and gradients.

The only file that uses torch's symmetric memory (``torch_private.py`` imports it), an alpha interface: its presence is checked when
it is needed, and it only provides the addresses of the peers' memory.

In order: the workspaces of this process, the :class:`Workspace` of a group with the slots of its layers, the :class:`PeerBuffers`
of an exchange, and the mapping of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.errors import ConfigError, DistributedError, nearest
from fabricamp.ops.bridge import kernel, runs_kernels
from fabricamp.ops.uploads import pinned_for_kernels
from fabricamp.torch_private import symmetric_memory

EXCHANGES: Final = ("peer", "collective")
"""How ranks exchange values: they reach each other's memory, or torch's collectives do it."""
NO_TURN: Final = -1
"""In place of a buffer's number: none has been used, and the first one is the next."""

_BLOCK_WORDS: Final = 2**19
"""Words of 8 bytes that are mapped at a time: 4 MiB, enough for a ResNet-50 on two ranks."""
_USUAL_TIMEOUT: Final = timedelta(minutes=30)
_LINE: Final = 128
_BARRIER_THREADS: Final = 32
_Word = TypeVar("_Word")
_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def checked_exchange(choice: str | None, name: str) -> str | None:
    """Returns ``choice`` of the option or variable ``name``; raises :class:`ConfigError` unless it is None or a known one."""
    if choice is None or choice in EXCHANGES:
        return choice
    raise ConfigError(
        f"{name}={choice!r} is not known (known: {', '.join(map(repr, EXCHANGES))}; unset: the fastest one that works)"
        f"{nearest(choice, EXCHANGES)}"
    )


_workspaces: dict[tuple[str, torch.device], tuple[weakref.ref[dist.ProcessGroup], Workspace | None, str]] = {}


def workspace_of(group: dist.ProcessGroup, device: torch.device) -> tuple[Workspace | None, str]:
    """Returns the group's workspace on ``device`` and "", or None and the reason.

    The first call is a collective; its answer is the same on every rank.
    """
    key = (group.group_name, device)
    known = _workspaces.get(key)
    if known is not None and known[0]() is group:  # else the name is that of an earlier group
        return known[1], known[2]
    workspace: Workspace | None = None
    reason = _obstacle(group, device)
    if not reason:
        workspace = Workspace(group, device)
        reason = workspace.grow(0)
        if reason:
            workspace = None
    _workspaces[key] = weakref.ref(group), workspace, reason
    return workspace, reason


def check_peers() -> None:
    """Raises :class:`DistributedError` if a kernel timed out waiting for a rank, in any group of this process.

    A layer checks at its next call.  This function is for times without such a call: after the last step, or between replays of
    a CUDA graph.
    """
    for _, workspace, _ in _workspaces.values():
        if workspace is not None:
            workspace.check()


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns why the ranks of a group cannot write each other's memory, the same on every rank; empty if they can."""
    own = (*_names_of(device), obstacle_on(device))
    everyone: list[tuple[str, str, str]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    if problem := next((problem for _, _, problem in everyone if problem), ""):
        return problem
    if len({host for host, _, _ in everyone}) > 1:
        return "the ranks are on several machines"
    if len({card for _, card, _ in everyone}) < len(everyone):
        return "several ranks share one GPU"
    return ""


def _names_of(device: torch.device) -> tuple[str, str]:
    """Returns names of the machine and of the device, the same in all processes of the machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    if device.type != "cuda":
        return host, f"process {os.getpid()}"
    return host, str(torch.cuda.get_device_properties(device).uuid)


def obstacle_on(device: torch.device) -> str:
    """Returns why kernels on ``device`` cannot exchange data with other ranks, as far as this process knows; empty if they can."""
    if not runs_kernels(device):
        return f"there are no kernels for {device.type}"
    if device.type not in ALLOCATORS:
        return f"ranks do not share memory on {device.type}"
    own = device.index or 0
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    if device.type == "cuda" and others and not any(torch.cuda.can_device_access_peer(own, other) for other in others):
        return "the GPUs of this machine do not reach each other's memory"
    return ""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class WorkspaceSlot:
    """A layer's range of the workspace; the workspace may reuse it after this object is deleted."""

    addresses: Tensor
    """Addresses of each rank's slot, in device memory."""
    own: int
    """Address of this rank's slot."""
    exchanges: Tensor
    """Number of exchanges that each channel has had, in device memory."""


class Workspace:
    """Memory of one group on one device, in slots that never move, and the word that names a rank that timed out.

    Slots are given out in the same order on every rank, because every rank reaches its layers in the same order.  A slot is
    reused after its object is deleted on every rank; an autograd graph that may still run backward also holds the slot.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = weakref.ref(group)
        self.device = device
        self.timeout = timeout_of(group, device)
        self.failed = torch.zeros(1, dtype=torch.int64, device=device)
        cuda = device.type == "cuda"
        self.host_failed = pinned_for_kernels(1, dtype=torch.int64) if cuda else torch.zeros_like(self.failed)
        # Read at every call: through ctypes this takes a tenth of a microsecond.
        self.failure = ctypes.c_longlong.from_address(self.host_failed.data_ptr())
        self._blocks: list[Mapped] = []
        self._free: list[_WordRange] = []  # the same on every rank, like the keys of _used
        self._used: dict[_WordRange, weakref.ref[WorkspaceSlot]] = {}
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def grow(self, words: int) -> str:
        """Maps a block for ``words`` more words; returns the reason if that fails, else "".  A collective with one answer."""
        group = self.group()
        assert group is not None
        size = max(words, _BLOCK_WORDS)
        block, problem = self._map(size, group)
        if block is None:
            return problem
        self._free.append(_WordRange(len(self._blocks), 0, size))
        self._blocks.append(block)
        return ""

    def slot(self, words: int, channels: int) -> WorkspaceSlot:
        """Returns a slot of ``words`` zeroed words for a layer of ``channels``; a collective if no words are left."""
        words += -words % 16  # lines of 128 bytes
        word_range = self._take(words)
        if word_range is None and self._used:
            self._reclaim()
            word_range = self._take(words)
        if word_range is None:
            if problem := self.grow(words):
                raise DistributedError(f"no more memory that all ranks can write: {problem}; set exchange='collective'")
            word_range = self._take(words)
        assert word_range is not None
        addresses = [address + 8 * word_range.start for address in self._blocks[word_range.block].addresses]
        slot = WorkspaceSlot(
            torch.tensor(addresses, dtype=torch.int64, device=self.device),
            addresses[self.rank],
            torch.zeros(channels, dtype=torch.int32, device=self.device),
        )
        self._used[word_range] = weakref.ref(slot)
        return slot

    def buffers(self, bytes_of_each: int, number: int) -> PeerBuffers | None:
        """Maps ``number`` buffers; returns None on every rank if that fails on one.  A collective."""
        words = -(-bytes_of_each // _LINE) * (_LINE // 8)
        group = self.group()
        assert group is not None
        block, _ = self._map(words * number, group)
        return None if block is None else PeerBuffers(self, block, 8 * words, number)

    def _map(self, words: int, group: dist.ProcessGroup) -> tuple[Mapped | None, str]:
        """Returns a block of zeroed words; or None, and the reason of the first rank that has one."""
        problem = ""
        block = None
        try:
            block = ALLOCATORS[self.device.type](words, group, self.device)
        except (RuntimeError, ImportError, AttributeError, OSError) as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        problems = self._gather(problem)  # all blocks are zeroed before a peer writes
        if any(problems):
            return None, next(filter(None, problems))
        return block, ""

    def _take(self, words: int) -> _WordRange | None:
        for index, (block, start, size) in enumerate(self._free):
            if size >= words:
                remainder = [_WordRange(block, start + words, size - words)] if size > words else []
                self._free[index : index + 1] = remainder
                return _WordRange(block, start, words)
        return None

    def _reclaim(self) -> None:
        """Frees the slots whose objects are deleted on every rank; a collective.

        A word of an earlier layer may hold an exchange number that the slot's next layer has yet to reach, and a peer's kernel
        may still be about to write such a word.  So all ranks first synchronise with idle devices: after that nothing writes to
        the slots that are deleted on all of them.  They zero these slots, and synchronise again before any rank reuses one.
        """
        deleted = self._gather([slot() is None for slot in self._used.values()])
        unused = [word_range for word_range, *ranks in zip(list(self._used), *deleted, strict=True) if all(ranks)]
        if not unused:
            return
        for word_range in unused:
            del self._used[word_range]
            self._blocks[word_range.block].own[word_range.start : word_range.start + word_range.words].zero_()
        self._gather(None)
        self._free = _joined([*self._free, *unused])

    def _gather(self, own: _Word) -> list[_Word]:
        """Waits for the device, then for all ranks; returns the ``own`` of each rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        gathered = [own] * self.ranks
        dist.all_gather_object(gathered, own, group=self.group())
        return gathered

    def check(self) -> None:
        """Raises :class:`DistributedError` if a kernel timed out waiting for a rank; does not wait."""
        missing = self.failure.value
        if missing:
            group = self.group()
            own = "?" if group is None else dist.get_rank()
            other = missing - 1 if group is None else dist.get_global_rank(group, missing - 1)
            raise DistributedError(
                f"rank {own} waited {self.timeout.total_seconds():g} s in a kernel (of SyncBatchNorm or FSDP) for rank {other}, "
                "which did not reach it: it is dead, hangs, or runs other layers; do not use values computed since then; see that "
                f"rank's log, or give the process group a longer timeout if it was only slow"
            )


class PeerBuffers:
    """Buffers of equal sizes on each rank that every rank can read, used in turn, and a barrier of the ranks' devices."""

    def __init__(self, workspace: Workspace, block: Mapped, size: int, number: int) -> None:
        self.size = size
        """Bytes of a buffer."""
        self.rank = workspace.rank
        self.ranks = workspace.ranks
        self._workspace = workspace
        self._block = block
        self._buffers: list[list[Tensor]] = [list(memory.view(torch.uint8).split(size)) for memory in block.peers]
        self._slot = workspace.slot(self.ranks, 1)
        self._number = number
        self.turn = NO_TURN
        """Number of the buffer that was used last: the same on all ranks."""
        self._device = workspace.device
        self._used: dict[int, torch.cuda.Event] = {}
        self._last_used = NO_TURN
        self._kernel = kernel("peer_barrier", "peer_barrier", (), workspace.device)
        self._arguments = (
            self._slot.addresses.data_ptr(),
            self._slot.own,
            self._slot.exchanges.data_ptr(),
            self.rank,
            self.ranks,
            int(workspace.timeout.total_seconds() * 1e9),
            workspace.failed.data_ptr(),
            workspace.host_failed.data_ptr(),
        )

    def next_turn(self) -> int:
        """Returns the number of the buffer that was not used for the longest time."""
        self.turn = (self.turn + 1) % self._number
        return self.turn

    def buffer(self, turn: int, rank: int | None = None) -> Tensor:
        """Returns the bytes of a buffer of ``rank``; None: of this rank."""
        return self._buffers[self.rank if rank is None else rank][turn]

    def wait_for_use(self, turn: int | None = None) -> None:
        """Makes the current stream wait for the last use of a buffer, or of any buffer: uses may be on several streams."""
        event = self._used.get(self._last_used if turn is None else turn)
        if event is not None:
            event.wait()

    def note_use(self, turn: int) -> None:
        """Notes that the current stream has used a buffer, to its last barrier."""
        self._last_used = turn
        if self._device.type == "cuda":
            self._used.setdefault(turn, torch.cuda.Event()).record()

    def forget_uses(self) -> None:
        """Forgets all uses; called before and after a capture, whose stream waits for earlier uses anyway."""
        self._used.clear()

    def barrier(self) -> None:
        """Makes the current stream wait until the streams of all ranks have come here, with what they wrote before.

        Raises :class:`DistributedError` if an earlier kernel timed out waiting for a rank.
        """
        self._workspace.check()
        self._kernel.launch(1, _BARRIER_THREADS, *self._arguments)


class _WordRange(NamedTuple):
    """A range of words in a block: ``start`` is the index of its first word."""

    block: int
    start: int
    words: int


def _joined(ranges: list[_WordRange]) -> list[_WordRange]:
    """Returns the same words, sorted, with adjacent ranges merged."""
    joined: list[_WordRange] = []
    for word_range in sorted(ranges):
        last = joined[-1] if joined else None
        if last is not None and (word_range.block, word_range.start) == (last.block, last.start + last.words):
            joined[-1] = last._replace(words=last.words + word_range.words)
        else:
            joined.append(word_range)
    return joined


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns the timeout of the group's collectives; 30 minutes if torch does not say."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        return _USUAL_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _USUAL_TIMEOUT


class Mapped(NamedTuple):
    """A block of words that all ranks have mapped.

    ``addresses``: each rank's block, as addresses in this process.  ``keep``: the object that keeps the mapping alive.
    """

    addresses: list[int]
    own: Tensor
    """This rank's words."""
    peers: list[Tensor]
    """Each rank's words."""
    keep: Any


def _symmetric_memory(words: int, group: dist.ProcessGroup, device: torch.device) -> Mapped:
    """Maps zeroed words through torch's symmetric memory; a collective of the group."""
    symmetric = symmetric_memory()

    with _without_multicast():
        own, problem = None, ""
        try:
            own = symmetric.empty(words, dtype=torch.int64, device=device)
            own.zero_()
        except RuntimeError as error:
            problem = str(error)
        # The others would wait in the rendezvous for a rank without memory.
        problems = [problem] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        if own is None or any(problems):
            raise RuntimeError(next(filter(None, problems)))
        handle = symmetric.rendezvous(own, group)
    peers = [handle.get_buffer(rank, (words,), torch.int64) for rank in range(dist.get_world_size(group))]
    return Mapped(list(handle.buffer_ptrs), own, peers, handle)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Keeps torch from setting up NVLink multicast: a scarce resource of the whole host, not used here."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


ALLOCATORS: Final[dict[str, Callable[[int, dist.ProcessGroup, torch.device], Mapped]]] = {"cuda": _symmetric_memory}
"""Maps zeroed words on all ranks of a group, by device type; the tests add one for "cpu"."""
