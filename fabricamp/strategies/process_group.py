"""Several processes over torch.distributed: rendezvous, exchange of values, teardown; the base of ddp and similar strategies.

After the strategy comes :class:`SideProcessGroup`: collectives of background threads, in a group separate from training's.  The
helpers of both are at the end.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
import time
from datetime import timedelta
from typing import ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabricamp.errors import ConfigError, DistributedError
from fabricamp.ops.extremes import all_reduce_extreme
from fabricamp.strategies.base import Environment, Strategy, check_reduction
from fabricamp.strategies.exchange import DEFAULT_BUCKET_MB, Exchange
from fabricamp.strategies.rendezvous_store import store_of
from fabricamp.torch_private import HashStore, PrefixStore, Store, default_store

Value = TypeVar("Value")

_EXTREMES = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# Values of these dtypes (left) are reduced in a wider one (right): Gloo or NCCL cannot reduce the dtype itself, or a sum in it
# would overflow or lose bits.  uint64 is missing, as int64 does not hold all its values; Gloo raises "Invalid scalar type" for it.
_WIDENED = {
    torch.bool: torch.int64,
    torch.uint8: torch.int64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

# Each run, and each barrier between runs, takes the next number as the prefix of its keys in the store, so it never reads keys of
# an earlier run or barrier.  The ranks' numbers agree, as every rank makes the same runs and barriers.
_run_numbers = itertools.count()


class ProcessGroupStrategy(Strategy):
    """One process per device, joined by torch.distributed: NCCL between GPUs, Gloo between CPUs.

    ``timeout`` (seconds or a timedelta; None: half an hour) is how long a collective waits for the slowest rank.  It also limits
    how long a run continues without progress on any rank: the watchdog (``fabricamp/watchdog/watch.py``) ends it shortly before.
    """

    distributed: ClassVar[bool] = True
    broadcast_buffers = True

    def __init__(self, *, timeout: float | timedelta | None = None) -> None:
        super().__init__()
        if timeout is not None:
            self.timeout = checked_timeout("timeout", timeout)
        self._store: Store | None = None
        self._owns_group = False

    @property
    def store(self) -> Store | None:
        """The key-value store of the rendezvous; each thread needs its own ``clone()``."""
        return self._store

    def setup_environment(self, environment: Environment, device: torch.device) -> None:
        """Joins the other processes through ``MASTER_ADDR`` and ``MASTER_PORT``, or uses the existing process group."""
        super().setup_environment(environment, device)
        if dist.is_initialized():
            self._use_existing_group(environment)
            return
        # Imported before the default group exists, so that the module does not keep the group alive after teardown: its functions
        # have the default group of the time of the import as a default argument, and torch may import it later by itself.
        importlib.import_module("torch.distributed.nn.functional")
        self._store = self._new_store(environment)
        dist.init_process_group(
            self._backend_for(device),
            store=PrefixStore("process_group", self._store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=self.timeout,
            device_id=device if device.type == "cuda" else None,
        )
        self._owns_group = True

    def _backend_for(self, device: torch.device) -> str:
        """Returns the backend of torch.distributed for tensors on ``device``, and on the host if parts are offloaded to it."""
        if device.type != "cuda":
            return "gloo"
        return "cpu:gloo,cuda:nccl" if self.offload else "nccl"

    def _use_existing_group(self, environment: Environment) -> None:
        """Uses the process group that the program created, and leaves its teardown to the program."""
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        if (rank, world_size) != (environment.rank, environment.world_size):
            raise ConfigError(
                f"torch.distributed is already initialised as rank {rank} of {world_size}, but this run is rank "
                f"{environment.rank} of {environment.world_size}; destroy that process group first, or ask for as many "
                "devices"
            )
        self._store = default_store()
        self._owns_group = False

    def _new_store(self, environment: Environment) -> Store:
        """Connects to the other ranks; returns a store without the keys of earlier runs of these processes."""
        if environment.world_size == 1:
            return HashStore()
        return PrefixStore(str(next(_run_numbers)), store_of(environment, self.name, self.timeout))

    def reduce(self, value: Tensor, reduce_op: str = "mean") -> Tensor:
        """Returns ``value`` reduced over the ranks by ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, detached.

        Integers stay exact: their sum is int64, their mean float64.  A nan of any rank is the result of every ``reduce_op``.
        """
        check_reduction(reduce_op, value)
        value = value.detach()
        integral = not (value.is_floating_point() or value.is_complex())
        widened = _WIDENED.get(value.dtype, value.dtype)
        own = value.to(self._exchange_device(value), widened)
        if reduce_op in _EXTREMES:
            return all_reduce_extreme(own, _EXTREMES[reduce_op]).to(value.device, value.dtype)
        reduced = own.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced)
        if reduce_op == "mean":
            if integral:
                reduced = reduced.double()
            reduced = reduced / self.world_size
        return reduced.to(value.device, reduced.dtype if integral else value.dtype)

    def _exchange_device(self, value: Tensor) -> torch.device:
        """Returns the device to exchange on: NCCL cannot send host memory."""
        return self.device if self.device.type == "cuda" else value.device

    def broadcast(self, value: Value, src: int = 0) -> Value:
        """Returns rank ``src``'s ``value`` (anything that pickles) on every rank."""
        box: list[Value | None] = [value if self.rank == src else None]
        dist.broadcast_object_list(box, src=src, device=self.device if self.device.type == "cuda" else None)
        return cast("Value", box[0])

    def all_gather(self, value: Tensor) -> Tensor:
        """Returns every rank's ``value`` (of one shape and dtype), stacked along a new first dimension, detached."""
        shape = (self.world_size, *value.shape)
        if value.numel() == 0:  # on all ranks, as they have one shape; there is nothing to exchange
            return value.detach().new_empty(shape)
        # Sent as bytes, so any dtype works.
        own = value.detach().to(self._exchange_device(value)).contiguous().reshape(-1).view(torch.uint8)
        gathered = own.new_empty(self.world_size, own.numel())
        # Into a list of views, because the one-tensor variants have different names in different versions of torch.
        dist.all_gather(list(gathered.unbind()), own)
        return gathered.view(-1).view(value.dtype).view(shape).to(value.device)

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns ``value`` (anything that pickles) of every rank, in rank order."""
        values: list[Value | None] = [None] * self.world_size
        dist.all_gather_object(values, value)  # has no argument for the device: with NCCL it uses the current GPU
        return cast("list[Value]", values)

    def barrier(self, name: str = "") -> None:
        """Waits for every rank; raises :class:`DistributedError` with ``name`` if a rank does not come.

        Between runs there is no process group; the ranks of the last run then synchronise through keys of the rendezvous' store.
        """
        try:
            if dist.is_initialized():
                # The current device, because the strategy's device may have no index.
                dist.barrier(device_ids=[torch.cuda.current_device()] if self.device.type == "cuda" else None)
            else:
                self._barrier_between_runs()
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.rank} waited in vain for the others at {name or 'a barrier'}: {error}"
            ) from error

    def _barrier_between_runs(self) -> None:
        environment = self.environment
        if environment.world_size == 1:
            return
        store = self._new_store(environment)
        keys = [f"{rank} is here" for rank in range(environment.world_size)]
        store.set(keys[environment.rank], "1")
        store.wait(keys, self.timeout)
        store.add("left", 1)
        if environment.rank == 0:  # it may host the store, so it leaves last
            while store.add("left", 0) < environment.world_size:  # adds nothing: the call returns the number so far
                time.sleep(0.01)

    def share_module(self, module: nn.Module) -> None:
        """Broadcasts rank 0's parameters and buffers, after a check that all ranks built the same module."""
        self.check_same_module(module)  # refuses lazy parameters in a single process, too
        if self.world_size > 1:
            Exchange(self.world_size, DEFAULT_BUCKET_MB).broadcast([*module.parameters(), *module.buffers()])

    def share_buffers(self, module: nn.Module) -> None:
        """Broadcasts rank 0's buffers, which a checkpoint contains, unless ``broadcast_buffers`` is off."""
        buffers = list(module.buffers())
        if buffers and self.broadcast_buffers and self.world_size > 1:
            Exchange(self.world_size, DEFAULT_BUCKET_MB).broadcast(buffers)

    def check_same_module(self, module: nn.Module) -> None:
        """Raises the same :class:`DistributedError` on every rank if the ranks built different modules.

        Raises :class:`ConfigError` on every rank if any has lazy parameters, which have no shape yet.
        """
        self.agree(_refusal_of_lazy(module))
        lines = described_module(module)
        digests = self.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest())
        odd_rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if odd_rank is None:
            return
        lines_by_rank = self.all_gather_object(lines if self.rank in (0, odd_rank) else [])
        first, other = _first_difference(lines_by_rank[0], lines_by_rank[odd_rank])
        raise DistributedError(
            f"ranks 0 and {odd_rank} built different modules: where rank 0 has {first}, rank {odd_rank} has {other}; "
            "build (and freeze) the module in the same way on every rank"
        )

    def teardown(self) -> None:
        """Destroys the process group if :meth:`setup_environment` made it.

        No reference to the group may remain, because its threads end only with it, and have to end before the interpreter does.
        Gloo's threads release a tensor shortly after its exchange and need the GIL for that; a thread that requests the GIL while
        the interpreter ends aborts the process.
        """
        super().teardown()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._store = None


class SideProcessGroup(Strategy):
    """Collectives over Gloo between background threads, one per rank, so that they cannot mix with those of training.

    Every rank creates it at the same point of its sequence of collectives, as torch's ``new_group`` is one itself.

    It is a :class:`Strategy` to be given to functions that write a checkpoint folder.  Only the exchange of objects works:
    ``broadcast``, ``all_gather_object``, and the methods that consist of these, such as ``on_rank_zero`` and ``agree``.  Tensors,
    modules and barriers go through the strategy of the run.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.environment = strategy.environment
        self.group = dist.new_group(backend="gloo", timeout=strategy.timeout)

    def broadcast(self, value: Value, src: int = 0) -> Value:
        """Returns rank ``src``'s ``value`` (anything that pickles) on every rank."""
        box: list[Value | None] = [value if self.rank == src else None]
        dist.broadcast_object_list(box, src=src, group=self.group)
        return cast("Value", box[0])

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns ``value`` (anything that pickles) of every rank, in rank order."""
        values: list[Value | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return cast("list[Value]", values)

    def leave(self) -> None:
        """Destroys the group."""
        group = self.group
        self.group = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


# -- helpers -----------------------------------------------------------------------------------------------------------------------


def described_module(module: nn.Module) -> list[str]:
    """Returns a line for each parameter and buffer, with everything that has to be the same on all ranks."""
    parameters = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in module.named_parameters()
    ]
    buffers = [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in module.named_buffers()]
    return parameters + buffers


def _refusal_of_lazy(module: nn.Module) -> ConfigError | None:
    """Returns the error that names the module's lazy parameters; None if it has none."""
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if not lazy:
        return None
    return ConfigError(
        f"{', '.join(lazy)} have no shape yet, and the ranks have to agree on it before the first batch; run one batch through the "
        "module in configure_model(), or give the layers their sizes"
    )


def checked_timeout(name: str, timeout: float | timedelta) -> timedelta:
    """Returns ``timeout`` (seconds or a timedelta) as a timedelta; raises :class:`ConfigError`, with the argument's ``name``."""
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return timeout
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 < timeout < math.inf:
        return timedelta(seconds=timeout)
    raise ConfigError(
        f"{name}={timeout!r} has to be a number of seconds above 0, a timedelta, or None for half an hour"
    )


def _first_difference(first: list[str], other: list[str]) -> tuple[str, str]:
    """Returns the first lines in which the two descriptions differ."""
    pairs = enumerate(zip(first, other, strict=False))
    position = next((index for index, (line, other_line) in pairs if line != other_line), min(len(first), len(other)))

    def described(lines: list[str]) -> str:
        return repr(lines[position]) if position < len(lines) else "nothing more"

    return described(first), described(other)
