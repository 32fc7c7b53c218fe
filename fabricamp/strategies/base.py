"""The interface of a strategy: the processes of a run, and the exchange of gradients and values between them.

:class:`Strategy` is also the strategy of one process.  In this order: the class variables that say how a strategy works; the ranks;
what a strategy overrides, in the order of a run; the exchange of values.  Members marked final follow from the others, and are only
asked.  What only some strategies can do is in ``strategies/capabilities.py``, Lightning's names are in
``strategies/lightning_names.py``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

import fabricamp._utils.first_rank  # noqa: F401 - sets the rank that lightning-utilities' functions look at
from fabricamp._utils.keywords import NamesKeywords
from fabricamp._utils.registry import Registry
from fabricamp.errors import ConfigError, DistributedError, FabricampError, nearest, reworded
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.strategies.capabilities import (
    FIXED,
    UNSHARDED,
    Membership,
    Sharding,
    check_attribute,
    check_class,
)
from fabricamp.strategies.capabilities import ShardPlan as ShardPlan
from fabricamp.strategies.lightning_names import LightningNames
from fabricamp.torch_private import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from fabricamp._utils.types import CheckpointFiles, StateDict, Step
    from fabricamp.gradients.memory import GradientMemory

Value = TypeVar("Value")

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The process's rank and world size, found by ``launch.detect`` and passed to :meth:`Strategy.setup_environment`."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    name: str = "single"


class Strategy(LightningNames, NamesKeywords):
    """One process on one device; the base class of the other strategies.

    A strategy that shards the module has :class:`~fabricamp.strategies.Sharding` among its bases, one whose processes come and go
    has :class:`~fabricamp.strategies.Membership`.

    Example:
        >>> strategy = Strategy()
        >>> strategy.rank, strategy.world_size, strategy.lockstep
        (0, 1, False)
    """

    name: ClassVar[str] = "single"
    distributed: ClassVar[bool] = False
    asks_for_parameters: ClassVar[bool] = False
    """Whether :meth:`reduce_gradients` gets a gradient memory in automatic optimization too."""

    eager_steps: ClassVar[int] = 0
    """Minimal number of eager steps before a step is captured as a CUDA graph, whatever the Trainer's setting."""

    averages_gradients: bool = True
    """Whether :meth:`reduce_gradients` averages over the ranks and does not only sum."""

    averages_weights: ClassVar[bool] = True
    """Whether losses may have weights; gradients are then divided by the sum of the weights over the ranks."""

    exchanges_after_backward: bool = False
    """Whether nothing may be exchanged before all backwards of a step are done; set before :meth:`wrap_module`."""

    offload: bool = False
    """Whether the updated parameters are in host memory, on any device."""

    tensor_parallel: int = 1
    """Number of neighbouring ranks that compute one batch together, each with its shard of the layers."""

    timeout: timedelta = timedelta(minutes=30)
    """How long a rank waits for the slowest rank."""

    group: ProcessGroup | None = None
    """The process group of the ranks; None is torch's default group."""

    start_method: str | None = None
    """How processes are started if the Trainer's ``start_method`` is "auto"; None: chosen automatically."""

    checkpoint_io: CheckpointFiles | None = None
    """The ``CheckpointIO`` that writes and reads checkpoints; None: fabricamp's own files."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_class(cls)

    def __init__(self) -> None:
        self.environment = Environment()
        self.device = torch.device("cpu")

    def __setattr__(self, name: str, value: object) -> None:
        check_attribute(self, name)
        super().__setattr__(name, value)

    def __getstate__(self) -> StateDict:
        """Returns the state without the reference to the last run."""
        return {key: value for key, value in self.__dict__.items() if key != "_session"}

    @property
    @final
    def sharding(self) -> Sharding:
        """How the module is sharded over the ranks: the strategy itself if it can do that."""
        return self if isinstance(self, Sharding) else UNSHARDED

    @property
    @final
    def membership(self) -> Membership:
        """How processes join and leave during a run: the strategy itself if it lets them."""
        return self if isinstance(self, Membership) else FIXED

    # -- the ranks -----------------------------------------------------------------------------------------------------------------

    def setup_environment(self, environment: Environment, device: torch.device) -> None:
        """Joins the run's processes and makes ``device`` the current one."""
        self.environment = environment
        self.device = device
        rank_zero_only.rank = environment.rank  # type: ignore[attr-defined]  # what lightning-utilities' functions look at
        if device.type == "cuda":
            torch.cuda.set_device(device)

    @property
    @final
    def rank(self) -> int:
        """The number of this process among all."""
        return self.environment.rank

    @property
    @final
    def world_size(self) -> int:
        """The number of processes."""
        return self.environment.world_size

    @property
    @final
    def data_ranks(self) -> int:
        """The number of shares of the data; neighbours that compute one batch together have the same share."""
        return self.world_size // self.tensor_parallel

    @property
    @final
    def data_rank(self) -> int:
        """The index of this process's share of the data."""
        return self.rank // self.tensor_parallel

    @property
    def train_share(self) -> tuple[int, int]:
        """This process's share of the training data, as (index, number of shares)."""
        return self.data_rank, self.data_ranks

    @property
    @final
    def lockstep(self) -> bool:
        """Whether all processes have to make each step together; the others wait if one leaves it out."""
        return self.world_size > 1 or self.membership.heals

    @property
    def store(self) -> Store | None:
        """The key-value store of the rendezvous, None for one process; each thread needs its own ``clone()``."""
        return None

    # -- the module, in the order of a run -----------------------------------------------------------------------------------------

    def place_module(self, module: nn.Module) -> None:
        """Moves the module to the device."""
        module.to(self.device)

    def share_module(self, module: nn.Module) -> None:
        """Broadcasts rank 0's parameters and buffers, after a check that all ranks built the same module.

        Called before precision converts the module, so all ranks take their fp32 masters from equal values.
        """

    def setup_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Returns the optimizers to step, prepared for the strategy."""
        return optimizers

    def wrap_module(self, module: nn.Module, step: Step, *, automatic: bool, accumulates: bool = False) -> Step:
        """Returns the callable that replaces ``step`` (``training_step``) in training; evaluation calls ``module``.

        With ``automatic`` False (manual optimization) only :meth:`reduce_gradients` exchanges gradients.
        ``accumulates``: some micro-batches will run under :meth:`no_sync`.  Raises :class:`ConfigError` for options that
        cannot work in this mode.
        """
        return step

    def rewrap_module(self, step: Step) -> Step:
        """Returns the callable for the next epoch: ``step`` itself unless parameters were frozen or unfrozen.

        Every rank calls it at the start of each epoch, after the hooks that may freeze.
        """
        return step

    def share_buffers(self, module: nn.Module) -> None:
        """Broadcasts the buffers that a checkpoint would contain; called before a validation, so it evaluates the saved state."""

    def module_state(self, module: nn.Module) -> StateDict:
        """Returns the module's state dict, the same on every rank except for local shards."""
        return module.state_dict()

    def teardown(self) -> None:
        """Undoes :meth:`setup_environment`."""

    # -- the steps -----------------------------------------------------------------------------------------------------------------

    def refuses_sums(self) -> str:
        """Returns why the precision cannot sum the gradients of micro-batches itself, and what to do; empty if it can.

        It does so in fp32 at O2 and O5: a step's sums are exchanged by :meth:`reduce_gradients`, after all backwards.
        """
        return ""

    def refuses_graph(self) -> str:
        """Returns why steps cannot be captured as CUDA graphs, and what to do; empty if they can."""
        if self.name == "single":
            return ""
        return f"strategy {self.name!r} is not captured; give strategy='delayed_ddp', or 'single' with devices=1"

    def refuses_parts(self) -> str:
        """Returns why a rank cannot run a micro-batch in parts where the others run it whole, and what to do; empty if it can."""
        if self.name == "single":
            return ""
        return (
            f"strategy {self.name!r} exchanges values within forward or backward, where the other ranks would wait for one that "
            "runs them again; give 'ddp', 'delayed_ddp' or 'single'"
        )

    def captured(self) -> AbstractContextManager[Callable[[], None] | None]:
        """Returns a context for the launches of a captured step.

        Its value is called after each replay of the step: it changes on the host what the step itself changes.  None if there is
        nothing.
        """
        return contextlib.nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context that keeps gradients local, for every micro-batch of a step except the last."""
        return contextlib.nullcontext()

    def note_window(self, *, begun: bool) -> None:
        """Says whether the next forward continues an accumulation (``begun``), when the strategy cannot know it.

        Called in a resumed run, after an accumulation was dropped, and after a replay of a CUDA graph.
        """

    def reduce_gradients(self, memory: GradientMemory | None = None) -> Gradients:
        """Completes the exchange of a step's gradients; returns the gradients for the update.

        ``memory`` None: the wrapped module's backward has exchanged them already.  Else the gradients in ``memory`` are still
        local and are exchanged now: its sums, or each ``.grad`` (manual optimization, and strategies with
        :attr:`asks_for_parameters`).
        """
        return IN_PLACE if memory is None else memory.local()

    # -- exchange of values --------------------------------------------------------------------------------------------------------

    def reduce(self, value: Tensor, reduce_op: str = "mean") -> Tensor:
        """Returns ``value`` reduced over the ranks by ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, detached.

        Integers stay exact: their sum is int64, their mean float64.  A nan of any rank is the result of every ``reduce_op``.
        """
        check_reduction(reduce_op, value)
        integral = not (value.is_floating_point() or value.is_complex())
        if integral and reduce_op in ("mean", "sum"):
            return value.detach().to(torch.float64 if reduce_op == "mean" else torch.int64)
        return value.detach()

    def broadcast(self, value: Value, src: int = 0) -> Value:
        """Returns rank ``src``'s ``value`` (anything that pickles) on every rank."""
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        """Returns every rank's ``value`` (of one shape and dtype), stacked along a new first dimension, detached."""
        return value.detach().unsqueeze(0)

    def all_gather_object(self, value: Value) -> list[Value]:
        """Returns ``value`` (anything that pickles) of every rank, in rank order."""
        return [value]

    @final
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Returns whether ``decision`` is true on all ranks, or with ``all`` False on any rank."""
        decisions = self.all_gather_object(bool(decision))
        return min(decisions) if all else max(decisions)

    def barrier(self, name: str = "") -> None:
        """Waits for every rank."""

    @final
    def on_rank_zero(self, action: Callable[[], Value]) -> Value:
        """Runs ``action`` on rank 0 only and returns its result (anything that pickles) on every rank.

        An error on rank 0 is raised on every rank: an error of fabricamp with its class and message, any other one as a
        :class:`DistributedError` that quotes it.  With one process the error is raised unchanged.
        """
        if self.world_size == 1:
            return action()
        result: Value | None = None
        failure: FabricampError | None = None
        if self.rank == 0:
            try:
                result = action()
            except FabricampError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the result and have to get the error
                failure = DistributedError(f"rank 0 failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
        result, received = self.broadcast((result, failure and portable(failure)))
        if received is not None:
            raise failure or received
        return cast("Value", result)

    @final
    def agree(self, problem: FabricampError | None) -> None:
        """Raises on every rank if any rank has a ``problem``: the class of the first, the messages of all.  Every rank calls it."""
        gathered = [problem] if self.world_size == 1 else self.all_gather_object(problem and portable(problem))
        problems = [error for error in gathered if error is not None]
        if problems:
            cause = (
                None if problem is None else problem.__cause__
            )  # not the problem itself, whose message would be shown twice
            raise reworded(problems[0], "; ".join(dict.fromkeys(map(str, problems)))) from cause


def portable(error: FabricampError) -> FabricampError:
    """Returns ``error`` as its nearest fabricamp class, because a class of a plugin or the user may not pickle."""
    family: type[FabricampError] = next(
        base for base in type(error).__mro__ if base.__module__ == FabricampError.__module__
    )
    return reworded(error, str(error), family)


def check_reduction(op: str, value: Tensor) -> None:
    """Raises :class:`ConfigError` if ``op`` cannot reduce ``value``."""
    if op not in REDUCTIONS:
        known = ", ".join(repr(name) for name in REDUCTIONS)
        raise ConfigError(f"op={op!r} is not a reduction{nearest(op, REDUCTIONS)} (known: {known})")
    if value.is_complex() and op in ("min", "max"):
        raise ConfigError(f"op={op!r} cannot order complex numbers ({value.dtype}); reduce their absolute values")


STRATEGIES: Registry[Strategy] = Registry("strategies", "strategy")
