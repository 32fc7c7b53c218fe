"""The face of a strategy: where the processes are, and how gradients and values travel between them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fabricamp.errors import ConfigError, nearest
from fabricamp.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch._C._distributed_c10d import Store
    from torch.optim import Optimizer

__all__ = ["IN_PLACE", "REDUCTIONS", "STRATEGIES", "Environment", "Gradients", "Strategy", "check_reduction"]

Value = TypeVar("Value")

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Which process this is: found by ``launch.detect``, handed to :meth:`Strategy.setup_environment`."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    name: str = "single"


class Gradients(NamedTuple):
    """What the update reads.

    ``tensors`` None: each parameter's own ``.grad``; else one tensor (or None) a parameter, in the order asked for.
    ``divisor``: what the values still have to be divided by (the average that a strategy folds into the update).
    ``present`` None: a parameter takes part where its tensor is not None; else one flag a parameter, in device memory.
    ``complete``: this rank knows, without a look at the flags, that every parameter with a tensor takes part.
    """

    tensors: Sequence[Tensor | None] | None = None
    divisor: float = 1.0
    present: Tensor | None = None
    complete: bool = False

    def values(self) -> Sequence[Tensor | None]:
        """Returns ``tensors``, None where a parameter takes no part; waits for the flags where this rank cannot know."""
        assert self.tensors is not None
        if self.present is None or self.complete:
            return self.tensors
        return [value if here else None for value, here in zip(self.tensors, self.present.tolist(), strict=True)]


IN_PLACE = Gradients()
"""Gradients that are ready where autograd left them."""


class Strategy:
    """One process on one device; the base of the others, which override what differs between processes."""

    name: ClassVar[str] = "single"
    distributed: ClassVar[bool] = False
    owns_master_weights: ClassVar[bool] = False
    asks_for_parameters: ClassVar[bool] = False
    """Whether :meth:`reduce_gradients` is told in automatic optimization too whose gradients it is about."""

    timeout: timedelta = timedelta(minutes=30)
    """How long a rank waits for the slowest one."""

    def __init__(self) -> None:
        self.environment = Environment()
        self.device = torch.device("cpu")

    @property
    def store(self) -> Store | None:
        """The key-value store that the processes met through, where there are several; one ``clone()`` per thread."""
        return None

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.environment.world_size

    def setup_environment(self, environment: Environment, device: torch.device) -> None:
        """Takes its place among the processes and makes ``device`` the current one."""
        self.environment = environment
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def share_module(self, module: nn.Module) -> None:
        """Gives every rank rank 0's parameters and buffers, after a check that all ranks built the same module.

        Comes before precision converts the module: the fp32 masters are taken from what every rank then has.
        """

    def wrap_module(
        self, module: nn.Module, step: Callable[..., Any], *, automatic: bool, accumulates: bool = False
    ) -> Callable[..., Any]:
        """Returns what the loop calls instead of ``step`` (``training_step``) in training; evaluation calls ``module``.

        With ``automatic`` False (manual optimization) gradients are exchanged by :meth:`reduce_gradients` alone.
        ``accumulates`` says that some micro-batches will run under :meth:`no_sync`.  Options that cannot work so are
        refused here.
        """
        return step

    def rewrap_module(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what the loop calls from now on: ``step`` itself unless parameters were frozen or unfrozen since.

        Every rank calls it at the start of each epoch, after the hooks that may freeze.
        """
        return step

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Returns the optimizers to step, after whatever the strategy has to do with them."""
        return optimizers

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which forward and backward leave gradients local: every micro-batch of a window but the last."""
        return contextlib.nullcontext()

    def resume_window(self) -> None:
        """Called where a resumed run goes on within a window: the next forward shares no more than it would have there."""

    def reduce_gradients(
        self, parameters: Sequence[Tensor] | None = None, buffers: Sequence[Tensor] | None = None
    ) -> Gradients:
        """Ends the exchange of a window's gradients and says where the update finds them.

        Without arguments: those that the wrapped module's backward has exchanged on its way.  With ``parameters``:
        their ``.grad``, left local by backward (manual optimization, and strategies that ask for them).  With
        ``buffers``: these tensors instead, summed elsewhere (fp32 accumulation).
        """
        return IN_PLACE if buffers is None else Gradients(tensors=buffers)

    def reduce_statistics(self, statistics: Tensor) -> None:
        """Sums gradient statistics over ranks that each hold a part of the gradients; nothing to do elsewhere."""

    def reduce(self, value: Tensor, op: str = "mean") -> Tensor:
        """Returns ``value`` reduced over the ranks by ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, detached.

        Integers stay exact: their sum is int64, their mean float64.
        """
        check_reduction(op, value)
        integral = not (value.is_floating_point() or value.is_complex())
        if integral and op in ("mean", "sum"):
            return value.detach().to(torch.float64 if op == "mean" else torch.int64)
        return value.detach()

    def broadcast(self, value: Value, source: int = 0) -> Value:
        """Returns rank ``source``'s ``value`` (anything that pickles) on every rank."""
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        """Returns every rank's ``value`` (of one shape and dtype), stacked along a new first dimension, detached."""
        return value.detach().unsqueeze(0)

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns ``value`` (anything that pickles) of every rank, in rank order."""
        return [value]

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's whole state dict, the same on every rank."""
        return module.state_dict()

    def barrier(self, name: str = "") -> None:
        """Waits for every rank."""

    def teardown(self) -> None:
        """Gives back what :meth:`setup_environment` took."""


def check_reduction(op: str, value: Tensor) -> None:
    """Raises :class:`ConfigError` where ``value`` cannot be reduced by ``op``."""
    if op not in REDUCTIONS:
        known = ", ".join(repr(name) for name in REDUCTIONS)
        raise ConfigError(f"op={op!r} is no reduction{nearest(op, REDUCTIONS)} (known: {known})")
    if value.is_complex() and op in ("min", "max"):
        raise ConfigError(f"op={op!r} cannot order complex numbers ({value.dtype}); reduce their absolute values")


STRATEGIES: Registry[Strategy] = Registry("strategies", "strategy")
