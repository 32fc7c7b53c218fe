"""The replica groups that make a step together, by torchft's manager; the remaining groups repeat a failed sum."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fabricamp._utils.optional_packages import load
from fabricamp._utils.types import StateDict
from fabricamp.errors import DistributedError
from fabricamp.gradients.buckets import RankSums
from fabricamp.torch_private import TCPStore

if TYPE_CHECKING:
    from collections.abc import Iterable


_LOG = logging.getLogger("fabricamp")
_MOST_TRIES: Final = 10
"""Maximal number of failures of a sum in a row; each retry uses the remaining groups."""


LoadState = Callable[[StateDict], None]
GetState = Callable[[], StateDict]
Connect = Callable[[LoadState, GetState], "Connection"]


class _Handle(Protocol):
    """A sum that has begun."""

    def wait(self) -> object:
        """Waits for it; the manager keeps its error."""
        ...


class Manager(Protocol):
    """What is asked of torchft's ``Manager``."""

    def start_quorum(self, *, shrink_only: bool) -> object:
        """Forms the group of the next step; without ``shrink_only`` other groups may join."""
        ...

    def num_participants(self) -> int:
        """Returns the number of groups in the step."""
        ...

    def participating_rank(self) -> int | None:
        """Returns this group's number among those of the step; None if it is not one of them."""
        ...

    def current_step(self) -> int:
        """Returns the number of steps that the groups have made."""
        ...

    def load_state_dict(self, state_dict: dict[str, int]) -> object:
        """Sets the numbers of steps and of committed batches."""
        ...

    def allreduce(self, tensor: Tensor, *, reduce_op: ReduceOp.RedOpType) -> _Handle:
        """Begins to sum or average a tensor over the groups, in place."""
        ...

    def should_commit(self) -> bool:
        """Returns whether the sums of the step have succeeded."""
        ...

    def errored(self) -> BaseException | None:
        """Returns the error of the step."""
        ...


class Connection(NamedTuple):
    """A group's connection to the other groups."""

    manager: Manager
    hang_up: Callable[[], None]
    """Aborts the process group of a step, so groups that wait for this one get an error."""
    close: Callable[[], None]
    """Ends the connection; the others then continue without this group."""


class Quorum(RankSums):
    """Sums gradients over the groups of a step, and admits groups between steps.

    A quorum starts between two steps; only then can another group join, and it gets the state of that point.  If a sum fails, the
    remaining groups repeat it with the same gradients.  A sum may have succeeded in some groups and failed in others.  So each
    group keeps its last sum; a group that lacks it gets it from a group that is one step ahead, and makes the same update.

    Args:
        connect: makes the manager from two functions.  The manager calls the first one with the state received from another
            group, and the second one for the state to send, from its own thread while :meth:`begin` waits.
        device: where the groups exchange tensors: NCCL sums no tensor that lies on the host.
    """

    def __init__(self, connect: Connect, device: torch.device | None = None) -> None:
        super().__init__()
        self._device = device or torch.device("cpu")
        self.state: Callable[[], Tensor] | None = None
        """Returns this run's full state, between two steps; None if there is no state to send."""
        self.steps = 0
        """Number of committed sums since the first group began; 0 before this group has joined."""
        self._open = False  # whether the quorum of the next step has started
        self._shrink_only = False  # whether it started without room for groups that join
        self._received: StateDict | None = None  # another group's state
        self._last: list[Tensor] = []  # this group's last sum, for a group that lacks it
        self._lacking: list[Tensor] | None = None  # another group's last sum, which this group lacks
        self._manager, self._hang_up, self.close = connect(self._load_state, self._get_state)

    @property
    def participants(self) -> int:
        """Number of groups in the current step, or in the last one."""
        return int(self._manager.num_participants())

    @property
    def _failure(self) -> str:
        """The first line of this quorum's error; empty if there is none."""
        error = self._manager.errored()
        return "" if error is None else str(error).partition("\n")[0]

    def join(self) -> tuple[bool, Tensor | None]:
        """Joins the first quorum; returns (whether all groups begin together, the state from another group or None)."""
        self._start(shrink_only=False)
        if failure := self._failure:
            raise DistributedError(f"this replica group could not join the others ({failure}); start it again to retry")
        received = self._take_received()
        begins = self._manager.current_step() == 0
        if begins:
            # At step 0 torchft makes all groups but one take that one's state, so no group stays at 0.
            self._manager.load_state_dict({"step": 1, "batches_committed": 0})
        elif received is None or received["state"] is None:
            raise DistributedError(
                "this replica group joined while the others retried a step, and got no state; start it again: it then joins "
                "between two steps"
            )
        self.steps = self._manager.current_step()
        return begins, None if received is None else received["state"]

    def begin(self, *, shrink_only: bool = False) -> None:
        """Starts the quorum of the next step, unless it has started; with ``shrink_only`` no group can join."""
        if self._open:
            return
        self._start(shrink_only=shrink_only)
        received = self._take_received()
        behind = 0 if received is None else received["step"] - self.steps
        if behind > 1:
            raise DistributedError(
                f"this replica group was left out of {behind} steps while it was held up, and cannot make them up; start it "
                "again: it then continues with the others' state (torchrun --max-restarts does so)"
            )
        if behind == 1 and received is not None:
            self._lacking = received["last"]

    def run(self, flats: Iterable[Tensor], *, alone: bool = False) -> None:
        """Averages ``flats`` in place over the groups of this step; if a group fails, over the remaining ones.

        Raises :class:`DistributedError` after too many failures in a row.
        """
        own = list(flats)
        self.begin()
        for _ in range(_MOST_TRIES):
            if self._averaged(own):
                return
            _LOG.warning("a sum over replica groups failed; the remaining groups retry it: %s", self._failure)
            self.begin(shrink_only=True)
        raise DistributedError(
            f"the sum of gradients over the replica groups failed {_MOST_TRIES} times in a row ({self._failure}); check "
            "that the machines reach each other, and that timeout is long enough"
        )

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Broadcasts the first group's ``tensors``, bit for bit, to all groups that begin together."""
        first = self._manager.participating_rank() == 0
        for tensor in tensors:
            own = tensor.detach().contiguous()
            # A sum of bytes, with zeros from the other groups, so any dtype works.
            data = own.reshape(-1).view(torch.uint8).to(self._device)
            if not first:
                data = torch.zeros_like(data)
            self._manager.allreduce(data, reduce_op=ReduceOp.SUM).wait()
            if failure := self._failure:
                raise DistributedError(
                    f"a replica group was lost before the first step ({failure}); start this one again"
                )
            tensor.detach().copy_(data.view(own.dtype).view(own.shape))

    def end(self) -> None:
        """Waits after the last step until groups that lack it have received it from the others."""
        self.begin(shrink_only=True)
        self._open = False
        self.begin(shrink_only=True)

    def _start(self, *, shrink_only: bool) -> None:
        self._received = None
        self._shrink_only = shrink_only
        try:
            self._manager.start_quorum(shrink_only=shrink_only)
        except (RuntimeError, TimeoutError) as error:
            why = "whether the lighthouse runs, and whether a group is held up for longer than quorum_timeout"
            if shrink_only:
                why += "; if the others have continued without this group, start it again: it then takes their state"
            raise DistributedError(f"no quorum of replica groups was formed ({error}); check {why}") from error
        self._open = True

    def _averaged(self, own: list[Tensor]) -> bool:
        """Sets ``own`` to the average; returns False, with ``own`` unchanged, if the sum failed."""
        if self._lacking is not None:
            averages = [value.to(tensor.device) for tensor, value in zip(own, self._lacking, strict=True)]
            self._lacking = None
            self.steps += 1  # the open quorum stays, for the next step
        else:
            averages = self._summed(own)
        for tensor, value in zip(own, averages, strict=False):
            tensor.copy_(value)
        self._last = averages
        return bool(averages)

    def _summed(self, own: list[Tensor]) -> list[Tensor]:
        """Returns the average over the groups; empty if the sum failed."""
        fits = [tensor.shape for tensor in self._last] == [tensor.shape for tensor in own]
        buffers = self._last if fits else [torch.empty_like(tensor) for tensor in own]
        # Buffers of a failed sum are not reused, because work in flight may still write to them.
        self._last = []
        for buffer, value in zip(buffers, own, strict=True):
            buffer.copy_(value)
        for work in [self._manager.allreduce(buffer, reduce_op=ReduceOp.AVG) for buffer in buffers]:
            work.wait()
        self._open = False
        if not self._manager.should_commit():
            # Gloo reports a dead process only to its neighbours; another group may still wait for one that has failed already.
            self._hang_up()
            return []
        self.steps = self._manager.current_step()
        return buffers

    def _load_state(self, received: StateDict) -> None:
        self._received = received

    def _take_received(self) -> StateDict | None:
        received = self._received
        self._received = None
        return received

    def _get_state(self) -> StateDict:
        # Within a step, where a failed sum is repeated, the run has no state to continue from.
        state = None if self._shrink_only or self.state is None else self.state()
        # Copied to the host at once: torchft copies on another stream, which would not wait for a clone on the GPU.
        last = [tensor.to("cpu", copy=True) for tensor in self._last]
        return {"step": self.steps, "last": last, "state": state}


def connect_torchft(
    load_state: LoadState,
    get_state: GetState,
    *,
    group: int,
    lighthouse: str,
    device: torch.device,
    timeout: timedelta,
    quorum_timeout: timedelta,
) -> Connection:
    """Returns the connection of a group of one process by torchft's manager, over Gloo, or NCCL on a GPU.

    Raises :class:`DistributedError` if the lighthouse does not answer, :class:`ConfigError` without torchft.
    """
    torchft = _torchft()
    host = socket.gethostname()
    # A new store on a free port, so keys left by an earlier start are never read.
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    process_group = _nccl(torchft, timeout) if device.type == "cuda" else torchft.ProcessGroupGloo(timeout=timeout)
    try:
        manager = torchft.Manager(
            pg=process_group,
            load_state_dict=load_state,
            state_dict=get_state,
            min_replica_size=1,
            use_async_quorum=False,
            lighthouse_addr=lighthouse,
            replica_id=str(group),
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=store.port,
            hostname=host,
            timeout=timeout,
            connect_timeout=timeout,
            quorum_timeout=quorum_timeout,
        )
    except (RuntimeError, TimeoutError) as error:
        raise DistributedError(
            f"torchft's lighthouse at {lighthouse} does not answer: {error}; start it first"
        ) from error

    def hang_up() -> None:
        process_group.abort(errored=False)

    def close(kept: object = store) -> None:  # noqa: ARG001 - keeps the store alive
        manager.shutdown()
        hang_up()

    return Connection(manager, hang_up, close)


def _nccl(torchft: Any, timeout: timedelta) -> Any:
    """Returns torchft's process group over NCCL, which aborts a communicator whose sum takes longer than ``timeout``."""
    # Both are read when a communicator is made.  The first one limits its start; torchft sets it too, with a warning.
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, math.ceil(timeout.total_seconds()))))
    # The host looks for errors while it waits for a sum.  Otherwise torch's watchdog does, which then holds the process up for
    # minutes (it waits for other ranks to write their flight records), or ends it.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")

    class ProcessGroup(torchft.ProcessGroupNCCL):  # type: ignore[misc]  # torchft is no requirement
        """torchft's, but an error of a sum aborts the communicator at once."""

        def _wrap_work(self, work: object, opts: object) -> Any:
            return super()._wrap_work(_Sum(work, self.abort), opts)

    return ProcessGroup(timeout=timeout)


class _Sum:
    """A sum over NCCL; its wait raises no error.

    torchft leaves the timer of a wait running if that raises, and the timer would later abort the next communicator.  After the
    abort here torchft reports that the sum failed.
    """

    def __init__(self, work: Any, abort: Callable[[], None]) -> None:
        self._work = work
        self._abort = abort

    def wait(self) -> bool:
        try:
            return bool(self._work.wait())
        except RuntimeError as error:
            _LOG.warning("NCCL reports: %s", str(error).partition("\n")[0])
            self._abort()
            return False

    def get_future(self) -> Any:
        return self._work.get_future()


def _torchft() -> Any:
    os.environ.setdefault("RUST_LOG", "warn")  # else torchft logs several lines at each step
    return load("torchft", "FaultTolerant needs the package torchft: pip install torchft")
