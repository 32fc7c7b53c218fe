"""apex's DistributedDataParallel and Reducer, for training scripts with their own loop, and related helpers."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fabricamp._utils.containers import tensors_within
from fabricamp._utils.say_once import say_once
from fabricamp.apex._extensions.apex_C import flatten as flatten
from fabricamp.apex._extensions.apex_C import unflatten as unflatten
from fabricamp.apex._full_values import share_full_values
from fabricamp.apex.parallel._flat_calls import apply_flat_dist_call as apply_flat_dist_call
from fabricamp.apex.parallel._flat_calls import extract_tensors as extract_tensors
from fabricamp.apex.parallel._flat_calls import flat_dist_call as flat_dist_call
from fabricamp.apex.parallel._flat_calls import import_flatten_impl as import_flatten_impl
from fabricamp.apex.parallel._flat_calls import split_by_type as split_by_type
from fabricamp.apex.parallel._flat_calls import split_half_float_double as split_half_float_double
from fabricamp.apex.parallel._module_layout import ModuleLayout, registrations
from fabricamp.arguments.checks import check_flag, check_number
from fabricamp.errors import ConfigError, nearest
from fabricamp.gradients.flat import Transport
from fabricamp.strategies.base import Environment
from fabricamp.strategies.exchange import (
    DEFAULT_BUCKET_MB,
    Exchange,
    checked_communicators,
    checked_transport,
    checked_triggers,
    marked,
)
from fabricamp.strategies.overlapped_allreduce import Lane, Overlap, lanes_for
from fabricamp.strategies.process_group import ProcessGroupStrategy
from fabricamp.torch_private import call_at_end_of_backward, current_backward

_WITHOUT_MEANING: Final = (
    "device_ids",
    "output_device",
    "dim",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
)
"""Arguments of torch's class without effect: the script moves batches, and the others are always on or not needed here."""


class DistributedDataParallel(nn.Module):
    """Wraps ``module`` so that after backward ``.grad`` holds gradients averaged over all processes.

    Messages of ``message_size`` elements are sent during backward (or each when one of ``allreduce_trigger_params`` has its
    gradient); with ``delay_allreduce`` everything is sent at the end of backward.  The constructor broadcasts rank 0's parameters
    and buffers.  Keywords of torch's class of this name are accepted too.

    >>> model = DistributedDataParallel(nn.Linear(2, 1), delay_allreduce=True)  # doctest: +SKIP
    """

    _enabled = True

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: object = None,
        allreduce_trigger_params: Sequence[Tensor | str] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Any], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: object = None,
        prof: bool = False,
        *,
        allreduce_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = False,
        process_group: object = None,
        **of_torch: Any,
    ) -> None:
        super().__init__()
        self.message_size = check_number("message_size", message_size, least=1)
        self.delay_allreduce = check_flag("delay_allreduce", delay_allreduce)
        self.allreduce_trigger_params = checked_triggers(allreduce_trigger_params)
        self.num_allreduce_streams = check_number("num_allreduce_streams", num_allreduce_streams, least=1)
        self.allreduce_communicators = checked_communicators(allreduce_communicators, self.num_allreduce_streams)
        self.retain_allreduce_buffers = check_flag("retain_allreduce_buffers", retain_allreduce_buffers)
        self.broadcast_buffers = check_flag("broadcast_buffers", broadcast_buffers)
        self.prof = check_flag("prof", prof)
        self.transport = checked_transport(
            allreduce_dtype,
            always_fp32=allreduce_always_fp32,
            average=gradient_average,
            predivide=gradient_predivide_factor,
        )
        self._check_combination(shared_param, process_group, of_torch)
        self.module = module
        self.rank, self.world_size = _share(module)
        self._open()
        if self._overlaps:
            self._open_lanes()

    def _open(self) -> None:
        """Creates the state that is not copied: a copy or pickle of the wrapper creates its own."""
        self._layout = ModuleLayout(
            self.module,
            self.transport,
            self.world_size,
            self.rank,
            message_size=math.inf if self.delay_allreduce else self.message_size,
            triggers=self.allreduce_trigger_params,
        )
        _wrappers.add(self)
        self._overlaps = not self.delay_allreduce and self.world_size > 1
        self._lanes: list[Lane] = []
        self._overlap: Overlap | None = None
        self._task = -1
        self._handles: list[RemovableHandle] = []

    def _open_lanes(self) -> None:
        # A copy opens its lanes only when it trains: one rank alone may make a copy, to average weights, but all ranks have to
        # open a group together.
        device = next((one.device for one in self.module.parameters()), torch.device("cpu"))
        # Other wrapped modules use the default group too.
        self._lanes = lanes_for(self.num_allreduce_streams, self.allreduce_communicators, device, default=False)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_layout", "_overlaps", "_lanes", "_overlap", "_task", "_handles")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._open()

    def _check_combination(self, shared_param: object, process_group: object, of_torch: dict[str, Any]) -> None:
        if shared_param is not None:
            raise ConfigError(
                "shared_param is not needed: parameters that modules share are exchanged once; leave it out"
            )
        if self.delay_allreduce and (self.num_allreduce_streams > 1 or self.allreduce_trigger_params):
            raise ConfigError(
                "delay_allreduce=True exchanges after backward, in one piece; leave num_allreduce_streams and "
                "allreduce_trigger_params out, or delay_allreduce"
            )
        if process_group is not None:
            raise ConfigError("process_group: gradients are averaged over all processes; leave it out")
        for name in of_torch:
            if name not in _WITHOUT_MEANING:
                known = [*inspect.signature(DistributedDataParallel.__init__).parameters, *_WITHOUT_MEANING]
                raise TypeError(f"DistributedDataParallel has no argument {name!r}{nearest(name, known)}")
        ignored = [name for name, value in of_torch.items() if value]
        if ignored and dist.is_initialized() and dist.get_rank() == 0:
            say_once(
                f"DistributedDataParallel ignores {', '.join(ignored)}: the script moves batches, parameters without "
                "gradients are always found, .grad are always views of flat memory",
                logging.INFO,
            )

    # -- a step ----------------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; a backward through the returned output exchanges gradients."""
        if self.world_size == 1:
            return self.module(*args, **kwargs)
        if self.broadcast_buffers and self._enabled:
            Exchange(1, DEFAULT_BUCKET_MB).broadcast(list(self.module.buffers()))
        output = self.module(*args, **kwargs)
        if self._enabled and torch.is_grad_enabled():
            trains = self._follow_layout()
            if trains and not _on_backward(output, self._begin) and self.training:
                self._listen_to_parameters()
        return output

    def _follow_layout(self) -> bool:
        """Rebuilds the layout and the overlap if parameters have changed; returns whether any parameter is trained."""
        flat = self._layout.refresh()
        overlap = self._overlap
        if self._overlaps and (overlap is None or overlap.flat is not flat):
            if overlap is not None:
                overlap.detach()
            if not self._lanes:
                self._open_lanes()
            self._overlap = Overlap(flat, self._lanes) if flat.messages else None
        return bool(flat.messages)

    def _listen_to_parameters(self) -> None:
        """Registers hooks that detect a backward by any gradient, for a module with an output in which no tensors are found."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: self._begin())
            for parameter in self.module.parameters()
            if parameter.requires_grad
        ]

    def enable_allreduce(self) -> None:
        """Turns the exchange on, for forwards from now on."""
        self._enabled = True

    def disable_allreduce(self) -> None:
        """Turns the exchange off, for forwards from now on: for all micro-batches of a step but the last."""
        self._enabled = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which forwards are not followed by an exchange."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether forwards are followed by an exchange at present; the name is that of torch's class."""
        return self._enabled

    @property
    def needs_refresh(self) -> bool:
        """Set it to True after parameters were added in a way that is not noticed; the next forward then looks at all of them."""
        return self._layout.stale

    @needs_refresh.setter
    def needs_refresh(self, value: bool) -> None:
        self._layout.stale = value

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """The flat tensors that ``.grad`` are views of; empty without ``retain_allreduce_buffers``."""
        flat = self._layout.flat
        return [] if flat is None or not self.retain_allreduce_buffers else [one.result for one in flat.messages]

    def _begin(self) -> None:
        """Starts the exchange of a backward, and schedules :meth:`_finish` for its end; runs once per backward."""
        task = current_backward()
        if task == self._task:
            return
        self._task = task
        call_at_end_of_backward(self._finish)
        if self._overlap is not None:
            self._overlap.begin()

    def _finish(self) -> None:
        overlap, layout = self._overlap, self._layout
        with marked("exchange of gradients", layout.device) if self.prof else contextlib.nullcontext():
            if overlap is None:
                layout.exchange()
                return
            flat = overlap.flat
            flat.write_back(overlap.finish())
            if flat.missing and overlap.behind:
                layout.differences.tell_of_delay(flat.missing, overlap.behind)


class Reducer:
    """Averages gradients over all processes when :meth:`reduce` is called: those of a module's parameters, or given tensors.

    The constructor broadcasts rank 0's parameters and buffers of a module.  After a reduce, ``.grad`` are views of flat memory.

    >>> reducer = Reducer(nn.Linear(2, 1))  # doctest: +SKIP
    """

    def __init__(self, module_or_grads_list: nn.Module | Sequence[Tensor]) -> None:
        self._tensors: list[Tensor] = []
        self._layout: ModuleLayout | None = None
        if isinstance(module_or_grads_list, nn.Module):
            rank, self._world_size = _share(module_or_grads_list)
            self._layout = ModuleLayout(module_or_grads_list, Transport(), self._world_size, rank)
            return
        self._world_size = dist.get_world_size()
        self._tensors = list(module_or_grads_list)
        if not all(isinstance(one, Tensor) for one in self._tensors):
            raise ConfigError("Reducer takes a module, or a list of tensors to average in place")

    def reduce(self) -> None:
        """Averages the gradients; every process has to call it."""
        if self._world_size == 1:
            return
        if self._layout is None:
            Exchange(self._world_size, DEFAULT_BUCKET_MB).average(self._tensors)
        else:
            self._layout.refresh()
            self._layout.exchange()


def _share(module: nn.Module) -> tuple[int, int]:
    """Broadcasts rank 0's parameters and buffers, after a check that all ranks built the same; returns rank and world size."""
    if not dist.is_initialized():
        raise ConfigError("there is no process group yet; call torch.distributed.init_process_group(...) first")
    registrations.begin()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        peers = ProcessGroupStrategy()
        peers.environment = Environment(rank=rank, world_size=world_size)
        peers.device = next((one.device for one in module.parameters()), torch.device("cpu"))
        peers.share_module(module)
        share_full_values(module, Exchange(1, DEFAULT_BUCKET_MB).broadcast)
    return rank, world_size


def _on_backward(output: Any, run: Callable[[], None]) -> bool:
    """Registers ``run`` to be called when a backward through ``output`` begins; returns whether ``output`` has a tensor for it."""
    found = [tensor for tensor in tensors_within(output) if tensor.grad_fn is not None]
    for tensor in found:
        tensor.register_hook(lambda _: run())
    return bool(found)


def wrappers_of(parameters: set[int]) -> list[DistributedDataParallel]:
    """Returns the wrappers around modules that have one of ``parameters`` (ids)."""
    return [one for one in _wrappers if any(id(parameter) in parameters for parameter in one.module.parameters())]


_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
