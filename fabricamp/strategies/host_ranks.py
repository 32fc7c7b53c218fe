"""The ranks of one host that load the same content: the first one reads it, the others get it over the network, in pieces."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fabricamp.errors import DistributedError, FabricampError
from fabricamp.strategies.base import Environment, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Value = TypeVar("Value")
    Part = tuple[int, int, int]
    """Index of a memory, and the first and the last byte of a part of it."""

PIECE: Final = 32 << 20
"""The most bytes that are sent at once; each rank has room for two such pieces beside what it loads."""


class HostRanks(Strategy):
    """Collectives among some ranks of a run, numbered from 0; with one rank each of them is that rank's own value.

    It is a :class:`Strategy` to be given to functions that read together.  Only the exchange of objects works, ``broadcast``,
    ``all_gather_object`` and what consists of these, and :meth:`fill`.
    """

    def __init__(self, strategy: Strategy | None = None, ranks: Sequence[int] = (0,)) -> None:
        super().__init__()
        self._ranks = ranks
        self._owns_group = False
        if strategy is None or len(ranks) == 1:
            return
        self.device = strategy.device
        self.environment = Environment(rank=ranks.index(strategy.rank), world_size=len(ranks))
        self.group = strategy.group
        if len(ranks) < strategy.world_size:
            self.group = dist.new_group([*ranks], timeout=strategy.timeout, use_local_synchronization=True)
            self._owns_group = True

    def broadcast(self, value: Value, src: int = 0) -> Value:
        """Returns rank ``src``'s ``value`` (anything that pickles) on every rank."""
        if self.world_size == 1:
            return value
        box: list[Value | None] = [value if self.rank == src else None]
        device = self.device if self.device.type == "cuda" else None
        dist.broadcast_object_list(box, src=self._ranks[src], group=self.group, device=device)
        return cast("Value", box[0])

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns ``value`` (anything that pickles) of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Value | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return cast("list[Value]", values)

    def fill(self, memories: Sequence[Tensor], read: Callable[[int, int, int], None]) -> None:
        """Fills ``memories`` (uint8, one-dimensional, in host memory) with the same bytes on every rank.

        On rank 0 ``read(index, start, stop)`` fills bytes of ``memories[index]``, part after part; the ranks have as many memories
        of the same sizes.  What is read is sent while the next piece is read.  An error of ``read`` is raised on every rank, as by
        :meth:`on_rank_zero`.
        """
        pieces = _pieces([memory.numel() for memory in memories])
        if self.world_size == 1:
            for piece in pieces:
                for part in piece:
                    read(*part)
            return
        room = min(sum(memory.numel() for memory in memories), PIECE)
        messages = [_Message(room, self) for _ in range(2)]
        failure: Exception | None = None
        for number, piece in enumerate(pieces):
            message = messages[number % 2]
            message.wait()
            if self.rank == 0:
                failure = _failure_of(read, piece)
                message.pack(memories, piece, failed=failure is not None)
            message.start(self._ranks[0])
            if self.rank != 0:
                message.wait()
                message.unpack(memories, piece)
            if message.failed:
                break
        for message in messages:
            message.wait()

        def outcome() -> None:
            if failure is not None:
                raise failure

        self.on_rank_zero(outcome)

    def close(self) -> None:
        """Destroys the process group, if it was made for these ranks."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None
        self._owns_group = False


class _Message:
    """Room for one piece, and a last byte that says whether reading it has failed."""

    def __init__(self, room: int, host: HostRanks) -> None:
        on_gpu = host.device.type == "cuda"
        self._here = torch.empty(room + 1, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        # NCCL cannot send host memory.
        self._sent = torch.empty_like(self._here, device=host.device) if on_gpu else self._here
        self._host = host
        self._work: dist.Work | None = None

    @property
    def failed(self) -> bool:
        """Whether reading this piece has failed."""
        return bool(self._here[-1])

    def pack(self, memories: Sequence[Tensor], piece: Sequence[Part], *, failed: bool) -> None:
        """Copies the piece out of the ranks' memory."""
        self._here[-1] = failed
        at = 0
        for index, start, stop in piece:
            self._here[at : at + stop - start] = memories[index][start:stop]
            at += stop - start

    def start(self, source: int) -> None:
        """Begins to send the piece to the other ranks, or to receive it."""
        if self._sent is not self._here and self._host.rank == 0:
            self._sent.copy_(self._here)
        self._work = dist.broadcast(self._sent, src=source, group=self._host.group, async_op=True)

    def wait(self) -> None:
        """Waits until the piece was sent, or has arrived."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._sent is not self._here and self._host.rank != 0:
            self._here.copy_(self._sent)

    def unpack(self, memories: Sequence[Tensor], piece: Sequence[Part]) -> None:
        """Copies the piece into the ranks' memory."""
        at = 0
        for index, start, stop in piece:
            memories[index][start:stop] = self._here[at : at + stop - start]
            at += stop - start


@contextlib.contextmanager
def host_ranks(strategy: Strategy, content: object) -> Iterator[HostRanks]:
    """Yields the ranks of this host whose ``content`` (anything that pickles) is equal to this rank's; every rank calls it.

    ``content`` says what a rank will read: ranks with another one are not among them.  Of a strategy whose ranks are not those of
    torch.distributed each rank is alone.
    """
    if not _is_joined(strategy):
        yield HostRanks()
        return
    own = (strategy.environment.node_rank, socket.gethostname(), content)
    everyone = strategy.all_gather_object(own)
    host = HostRanks(strategy, [rank for rank, other in enumerate(everyone) if other == own])
    try:
        yield host
    finally:
        host.close()


def _is_joined(strategy: Strategy) -> bool:
    return (
        strategy.world_size > 1
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size(strategy.group) == strategy.world_size
    )


def _pieces(sizes: Sequence[int]) -> Iterator[list[Part]]:
    """Yields the parts of memories of these sizes that are sent together."""
    piece: list[Part] = []
    free = PIECE
    for index, size in enumerate(sizes):
        start = 0
        while True:
            stop = min(size, start + free)
            piece.append((index, start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield piece
                piece = []
                free = PIECE
            if start == size:
                break
    if piece:
        yield piece


def _failure_of(read: Callable[[int, int, int], None], piece: Sequence[Part]) -> Exception | None:
    try:
        for part in piece:
            read(*part)
    except FabricampError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the other ranks wait for the piece and have to get the error
        failure = DistributedError(f"the rank that reads failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return None
