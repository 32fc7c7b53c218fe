"""torch's DistributedDataParallel as a strategy, with the same results, overlap and options.

In this order: the wrapper of a run, and the next one if parameters are frozen or unfrozen; the exchange of a step; the checks of
the options.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import math
import operator
import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fabricamp._utils.say_once import say_once
from fabricamp._utils.without_compiler import making_ddp
from fabricamp.arguments.checks import check_flag
from fabricamp.errors import ConfigError, DistributedError
from fabricamp.gradients.flat import IN_PLACE, FlatGradients, Gradients, Transport
from fabricamp.strategies.exchange import DEFAULT_BUCKET_MB, Exchange, elements_of
from fabricamp.strategies.process_group import ProcessGroupStrategy
from fabricamp.strategies.unused_parameters import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from datetime import timedelta

    from torch import Tensor

    from fabricamp._utils.types import Step
    from fabricamp.gradients.memory import GradientMemory
    from fabricamp.strategies.ddp_strategy import DDPStrategy as DDPStrategy

_OWN_DTYPE: Final = Transport()
_MOST_LISTS: Final = 8
"""Lists of parameters whose flat buffers are kept: manual optimization exchanges those of each optimizer by themselves."""
_NEVER: Final = 2**31 - 1
_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")


class DDP(ProcessGroupStrategy):
    """Every process holds the full module; torch's DistributedDataParallel averages gradients during backward.

    The options are torch's.  The bits equal those of a hand-written ``DistributedDataParallel(model)`` with the same options.

    Args:
        find_unused_parameters: searches in each step for parameters that the loss does not reach; needed if there are any.  It
            has no effect with manual optimization, which needs no search.
        static_graph: the loss reaches the same parameters in every step.
        gradient_as_bucket_view: gradients are views of the buckets, which saves a copy of them.
        bucket_cap_mb: the size of a bucket; None is torch's default (25 MB after a first bucket of 1 MB).  The fp32 sums of an
            accumulation at O2 and O5 are sent in pieces of at least this size, or at once.
        comm_hook: a function of ``(state, bucket)``, or a pair ``(state, function)``; not with accumulation at O2 and O5.
        broadcast_buffers: broadcasts rank 0's buffers in each step.
        timeout: seconds (or a timedelta) that a rank waits for the others; None is half an hour.

    Example:
        >>> DDP(find_unused_parameters=True, timeout=600).name
        'ddp'
    """

    name: ClassVar[str] = "ddp"
    # torch's wrapper records timing events in its first ten steps, which cannot be captured.
    eager_steps: ClassVar[int] = 11

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        comm_hook: Callable[..., Any] | tuple[object, Callable[..., Any]] | None = None,
        broadcast_buffers: bool = True,
        timeout: float | timedelta | None = None,
    ) -> None:
        super().__init__(timeout=timeout)
        self.find_unused_parameters = check_flag("find_unused_parameters", find_unused_parameters, owner="DDP")
        self.static_graph = check_flag("static_graph", static_graph, owner="DDP")
        self.gradient_as_bucket_view = check_flag("gradient_as_bucket_view", gradient_as_bucket_view, owner="DDP")
        self.broadcast_buffers = check_flag("broadcast_buffers", broadcast_buffers, owner="DDP")
        self.bucket_cap_mb = _checked_capacity(bucket_cap_mb)
        self.comm_hook = None if comm_hook is None else _checked_hook(comm_hook)
        self._forward: _Forward | None = None
        self._wrapper: DistributedDataParallel | None = None
        self._trainable: dict[str, nn.Parameter] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self._flats: dict[tuple[int, ...], FlatGradients] = {}
        self._shared: nn.Module | None = None
        """The module whose buffers are broadcast after each exchange, where that comes after backward."""
        self._exchange_of_buffers = Exchange(1, DEFAULT_BUCKET_MB)

    def refuses_parts(self) -> str:
        """Returns why a rank cannot run a micro-batch in parts: options of torch's wrapper, which exchanges within backward."""
        given = [name for name in ("static_graph", "gradient_as_bucket_view", "comm_hook") if getattr(self, name)]
        if not given:
            return ""
        return f"DDP({', '.join(given)}) belongs to torch's wrapper, which exchanges within backward; leave it out"

    def wrap_module(self, module: nn.Module, step: Step, *, automatic: bool, accumulates: bool = False) -> Step:
        """Returns the callable for training: torch's wrapper, or in manual optimization the step itself."""
        self._check_mode(automatic=automatic, accumulates=accumulates)
        if automatic:
            _check_trainable(module)
        # A second broadcast: since the first one, optimizers and hooks may have changed weights differently on each rank.
        self.share_module(module)
        self._release()
        if automatic and not self.exchanges_after_backward:
            return self._wrapped(_Forward(module, step))
        if not self.broadcast_buffers or next(module.buffers(), None) is None:
            return step
        exchange = Exchange(1, self.bucket_cap_mb or DEFAULT_BUCKET_MB)
        if self.exchanges_after_backward:
            self._shared, self._exchange_of_buffers = module, exchange
            return step
        return AfterBroadcast(step, module, exchange)

    def _check_mode(self, *, automatic: bool, accumulates: bool) -> None:
        if not automatic:
            if self.find_unused_parameters and self.rank == 0:
                # Most GANs for Lightning set it, because Lightning's wrapper needs it; the result is the same without.
                say_once(
                    "find_unused_parameters=True changes nothing with automatic_optimization=False: parameters without gradients "
                    "are fine there",
                    logging.INFO,
                )
            of_the_wrapper = ("static_graph", "gradient_as_bucket_view", "comm_hook")
            refused = [name for name in of_the_wrapper if getattr(self, name)]
            if refused:
                raise ConfigError(
                    f"strategy=DDP({', '.join(refused)}) with automatic_optimization=False: that belongs to torch's "
                    "wrapper, which manual optimization does without; leave it out"
                )
        elif self.static_graph and accumulates:
            raise ConfigError(
                "strategy=DDP(static_graph=True) cannot leave gradients local for a micro-batch, which "
                "accumulate_grad_batches > 1 and fp32 sums of half gradients need; leave static_graph out, or use "
                "find_unused_parameters=True"
            )

    def _wrapped(self, forward: _Forward) -> DistributedDataParallel:
        named = list(forward.module.named_parameters())
        # torch's reducer numbers the parameters in this order.
        self._trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
        self._forward = forward
        options: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        if not self.broadcast_buffers:
            # Newer versions of torch have a new name for the option, and warn about the old one.
            known = inspect.signature(DistributedDataParallel.__init__).parameters
            options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
        with making_ddp():
            self._wrapper = DistributedDataParallel(
                forward,
                find_unused_parameters=self.find_unused_parameters,
                static_graph=self.static_graph,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                **options,
            )
        self._wrapper.reducer._set_ddp_runtime_logging_sample_rate(_NEVER)  # later steps can be captured
        if self.comm_hook is not None:
            self._wrapper.register_comm_hook(*self.comm_hook)
        return self._wrapper

    def rewrap_module(self, step: Step) -> Step:
        """Returns the callable for the next epoch: a new wrapper if any rank froze or unfroze parameters, else ``step``."""
        if self._forward is None:
            return step
        changed = any(not parameter.requires_grad for parameter in self._trainable.values()) or self._unfrozen()
        if not self.reduce(torch.tensor(bool(changed), dtype=torch.bool, device="cpu"), "max").item():
            return step
        forward = self._forward
        _check_trainable(forward.module)
        self.check_same_module(forward.module)
        self._exchange_frozen()
        self._release()
        return self._wrapped(forward)

    def _unfrozen(self) -> list[str]:
        return [name for name, parameter in self._frozen.items() if parameter.requires_grad]

    def _exchange_frozen(self) -> None:
        """Averages the gradients of newly frozen parameters from an accumulation in progress; the new wrapper would not."""
        for parameter in self._trainable.values():
            if parameter.requires_grad:
                continue
            begun = torch.tensor(parameter.grad is not None, dtype=torch.bool, device="cpu")
            if self.reduce(begun, "max").item():
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.reduce(own)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that keeps gradients local, for every micro-batch of a step except the last."""
        if self._wrapper is None:
            return contextlib.nullcontext()
        if self.static_graph:
            self._check_mode(automatic=True, accumulates=True)
        return self._wrapper.no_sync()

    def refuses_sums(self) -> str:
        """Returns why the precision cannot sum gradients itself: torch's wrapper calls a hook with those of one backward."""
        if self.comm_hook is None:
            return ""
        return (
            "DDP(comm_hook=...) would never be called, because torch's wrapper calls it with the gradients of one backward; leave "
            "comm_hook out, leave accumulate_grad_batches at 1, or accumulate at O0, O1, O3 or O4"
        )

    def refuses_graph(self) -> str:
        """Returns why steps cannot be captured as CUDA graphs, and what to do; empty if they can."""
        if self.find_unused_parameters:
            return (
                "DDP(find_unused_parameters=True) searches on the host for the parameters that a step has used; give "
                "strategy='delayed_ddp', which does not"
            )
        return ""

    def note_window(self, *, begun: bool) -> None:
        """Makes the wrapper broadcast rank 0's buffers in the next forward if that is the first of a step."""
        wrapper = self._wrapper
        if wrapper is not None and wrapper.require_forward_param_sync is begun:
            wrapper.require_forward_param_sync = not begun

    def reduce_gradients(self, memory: GradientMemory | None = None) -> Gradients:
        """Completes the exchange of a step's gradients; returns the gradients for the update.

        Raises :class:`DistributedError` if some gradients were not exchanged: backward left parameters out, or frozen ones
        were unfrozen in the middle of an epoch.
        """
        if memory is None:
            if self._wrapper is not None:
                self._check_exchanged(self._wrapper)
            return IN_PLACE
        if memory.flat is not None and self._wrapper is not None:
            # All forwards of the step ran under no_sync, so torch would never broadcast the module's buffers again.
            self._wrapper.require_forward_param_sync = True
        gradients = self._exchange(memory)
        if self._shared is not None:
            self._exchange_of_buffers.broadcast(list(self._shared.buffers()))
        return gradients

    def _exchange(self, memory: GradientMemory) -> Gradients:
        if self.world_size == 1:
            return memory.local()
        if memory.flat is not None:
            size = math.inf if self.bucket_cap_mb is None else elements_of(self.bucket_cap_mb)
            return memory.sum_over_ranks(_OWN_DTYPE, self.world_size, message_size=size)
        flat = self._flat_of(memory.parameters)
        flat.copy_back(flat.exchange())
        return IN_PLACE

    def _check_exchanged(self, wrapper: DistributedDataParallel) -> None:
        try:
            # torch checks only in the next forward, after the wrong update was made.
            wrapper.reducer._check_reducer_finalized()
        except RuntimeError as error:
            match = _UNUSED.search(str(error))
            if match is None:
                raise
            names = list(self._trainable)
            raise self._unused([names[int(index)] for index in match[1].split()]) from error
        if self._frozen and (unfrozen := self._unfrozen()):
            raise DistributedError(
                f"{listed(unfrozen)} got requires_grad=True in the middle of an epoch, and ddp does not exchange "
                "their gradients yet; unfreeze at the start of an epoch (on_train_epoch_start)"
            )

    def _unused(self, names: list[str]) -> DistributedError:
        """Returns the error for parameters without a gradient."""
        frozen = [name for name in names if not self._trainable[name].requires_grad]
        if frozen:
            return DistributedError(
                f"rank {self.rank}: {listed(frozen)} got requires_grad=False in the middle of an epoch, and ddp "
                "waits for their gradients; freeze at the start of an epoch (on_train_epoch_start)"
            )
        return DistributedError(
            f"rank {self.rank}: backward gave no gradient to {len(names)} of {len(self._trainable)} parameters: "
            f"{listed(names)}; let the loss depend on them, freeze them before fit (requires_grad=False), or use "
            "strategy=DDP(find_unused_parameters=True)"
        )

    def _flat_of(self, parameters: Sequence[Tensor]) -> FlatGradients:
        """Returns the flat memory to exchange ``parameters`` in; all have a slot, also those frozen in the current step."""
        key = tuple(map(id, parameters))
        if key not in self._flats:
            if len(self._flats) == _MOST_LISTS:
                self._flats.clear()
            size = elements_of(self.bucket_cap_mb or DEFAULT_BUCKET_MB)
            self._flats[key] = FlatGradients(
                parameters, _OWN_DTYPE, self.world_size, message_size=size, key=operator.neg, frozen=()
            )
        return self._flats[key]

    def teardown(self) -> None:
        """Removes torch's hooks from the module, and destroys the process group if :meth:`setup_environment` made it."""
        self._release()
        super().teardown()

    def _release(self) -> None:
        """Removes the wrapper and its hooks, because a second wrapper on the same parameters must not run them too."""
        if self._wrapper is not None:
            self._wrapper.reducer._remove_autograd_hooks()
            # A remaining reference to the wrapper must not keep the process group alive, which has to end with the run.
            del self._wrapper.reducer, self._wrapper.logger, self._wrapper.process_group
        self._forward = None
        self._wrapper = None
        self._shared = None
        self._trainable = {}
        self._frozen = {}
        self._flats.clear()


class _Forward(nn.Module):
    """The module inside torch's wrapper; its forward is the step, so the user's own forward stays unchanged."""

    def __init__(self, module: nn.Module, step: Step) -> None:
        super().__init__()
        self.module = module
        # Bypasses nn.Module's __setattr__, which would register a compiled step (a module) a second time.
        object.__setattr__(self, "forward", step)


class AfterBroadcast:
    """A step that first broadcasts rank 0's buffers, as torch's wrapper does; for manual optimization."""

    def __init__(self, step: Step, module: nn.Module, exchange: Exchange) -> None:
        self._step = step
        self._module = module
        self._exchange = exchange

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Broadcasts the buffers, then runs the step."""
        self._exchange.broadcast(list(self._module.buffers()))
        return self._step(*args, **kwargs)


def _check_trainable(module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            f"strategy='ddp' exchanges gradients, but {type(module).__name__} has no parameter with "
            "requires_grad=True; unfreeze some, or use strategy='single' with devices=1"
        )


def _checked_capacity(value: object) -> float | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf):
        return value
    raise ConfigError(f"DDP(bucket_cap_mb={value!r}) has to be a number of megabytes above 0, or None for torch's own")


def _checked_hook(comm_hook: object) -> tuple[object, Callable[..., Any]]:
    if isinstance(comm_hook, tuple) and len(comm_hook) == 2:
        state, hook = comm_hook
    else:
        state, hook = None, comm_hook
    # torch reads a hook's name and its argument "bucket", and fails with an unclear error if one is missing.
    if not (callable(hook) and hasattr(hook, "__name__") and "bucket" in inspect.signature(hook).parameters):
        raise ConfigError(
            f"DDP(comm_hook={comm_hook!r}) has to be a function of (state, bucket) such as those of "
            "torch.distributed.algorithms.ddp_comm_hooks, or a pair (state, function)"
        )
    return state, hook


def __getattr__(name: str) -> Any:
    if name == "DDPStrategy":  # Lightning's import path
        return getattr(importlib.import_module("fabricamp.strategies.ddp_strategy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
