"""The face of a strategy: where the processes are, and how gradients and values travel between them."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

import fabricamp.first_rank  # noqa: F401 - sets the rank that lightning-utilities' functions look at
from fabricamp.errors import ConfigError, DistributedError, FabricampError, nearest
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.keywords import NamesKeywords
from fabricamp.registry import Registry
from fabricamp.torch_private import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from fabricamp.gradients.memory import GradientMemory

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What a strategy that shards has to know of a run, above all in which dtype parameters are gathered."""

    compute_dtype: torch.dtype | None = None
    """None: the parameters' own."""
    stored_dtype: torch.dtype | None = None
    """What trained parameters are cast to before they are sharded; None: they stay what they are, masters at O2 and O5."""
    kept: Collection[nn.Module] = ()
    """Modules whose own parameters are gathered as they are."""
    accumulates: bool = False
    """Whether windows have several micro-batches."""
    filled_later: bool = False
    """Whether a checkpoint's weights follow, so that parameters need no first values."""


class Strategy(NamesKeywords):
    """One process on one device; the base of the others, which override what differs between processes."""

    name: ClassVar[str] = "single"
    distributed: ClassVar[bool] = False
    owns_master_weights: ClassVar[bool] = False
    asks_for_parameters: ClassVar[bool] = False
    """Whether :meth:`reduce_gradients` is told in automatic optimization too whose gradients it is about."""

    eager_steps: ClassVar[int] = 0
    """How many steps run eagerly, whatever is asked for, before one is captured as a CUDA graph."""

    averages_gradients: bool = True
    """Whether :meth:`reduce_gradients` averages over the ranks, where there are several."""

    averages_weights: ClassVar[bool] = True
    """Whether losses may come with weights, by whose sum over the ranks gradients are divided."""

    heals: ClassVar[bool] = False
    """Whether processes come and go in the middle of a run: one that comes takes the others' state (:meth:`join`)."""

    checkpoint_form: ClassVar[Literal["file", "folder"]] = "file"
    """A file that rank 0 writes, or a folder that all ranks write, each the parts that it holds."""

    offload: bool = False
    """Whether what is updated is in host memory, whatever the device is."""

    tensor_parallel: int = 1
    """How many neighbouring ranks compute one batch together, each a part of its layers."""

    timeout: timedelta = timedelta(minutes=30)
    """How long a rank waits for the slowest one."""

    group: ProcessGroup | None = None
    """Where the ranks meet; None is torch's default group."""

    _session: Callable[[], object] = staticmethod(lambda: None)
    start_method: str | None = None
    """How processes are started where the Trainer's ``start_method`` is "auto"; None for what fits."""

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
    def global_rank(self) -> int:
        """The number of this process among all."""
        return self.environment.rank

    @property
    def local_rank(self) -> int:
        """The number of this process on its node."""
        return self.environment.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        return self.environment.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.environment.rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.device

    @property
    def strategy_name(self) -> str:
        """The strategy's name."""
        return self.name

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.environment.world_size

    @property
    def data_ranks(self) -> int:
        """How many parts the data is dealt out in: neighbours that compute one batch together have the same one."""
        return self.world_size // self.tensor_parallel

    @property
    def data_rank(self) -> int:
        """Which of these parts is this process's."""
        return self.rank // self.tensor_parallel

    @property
    def lightning_module(self) -> Any:
        """The module of the running, or last, fit, validate, test or predict; None before the first."""
        return getattr(self._session(), "module", None)

    @property
    def model(self) -> Any:
        """The module."""
        return self.lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """What ``configure_optimizers`` returned."""
        return getattr(self._session(), "optimizers", [])

    @property
    def precision_plugin(self) -> Any:
        """The precision."""
        return getattr(self._session(), "precision", None)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - Lightning's name
        """Returns whether the ``decision`` of ``all`` ranks, or of any of them, is true."""
        found = self.all_gather_object(bool(decision))
        return min(found) if all else max(found)

    @property
    def lockstep(self) -> bool:
        """Whether each step is made together with other processes, which wait where this one leaves it out."""
        return self.world_size > 1

    @property
    def train_share(self) -> tuple[int, int]:
        """Which part of the training data is this process's, and of how many."""
        return self.data_rank, self.data_ranks

    def attach(self, session: object) -> None:
        """Lets others ask for the module and its optimizers; the Trainer calls it."""
        self._session = weakref.ref(session)

    def __getstate__(self) -> dict[str, Any]:
        """All but the last run."""
        return {key: value for key, value in self.__dict__.items() if key != "_session"}

    def setup_environment(self, environment: Environment, device: torch.device) -> None:
        """Takes its place among the processes and makes ``device`` the current one."""
        self.environment = environment
        self.device = device
        rank_zero_only.rank = environment.rank  # type: ignore[attr-defined]  # what lightning-utilities' functions look at
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def shard_module(self, module: nn.Module, plan: ShardPlan) -> str:
        """Leaves each rank with its part of the module's parameters; returns a line that tells of it, empty where all stay whole.

        Comes behind ``configure_model``, before weights of a checkpoint are loaded.
        """
        return ""

    def unshard_module(self, module: nn.Module, *, whole: bool = True) -> None:
        """Undoes :meth:`shard_module` after a run; rank 0 has the ``whole`` parameters then, else nobody."""

    def place_module(self, module: nn.Module) -> None:
        """Brings the module to the device."""
        module.to(self.device)

    def share_module(self, module: nn.Module) -> None:
        """Gives every rank rank 0's parameters and buffers, after a check that all ranks built the same module.

        Comes before precision converts the module: the fp32 masters are taken from what every rank then has.
        """

    def share_buffers(self, module: nn.Module) -> None:
        """Gives every rank the buffers that a checkpoint would have, before a validation: it judges what is saved."""

    def settle_module(self, module: nn.Module) -> None:
        """Leaves ``module`` with the parameters that optimizers update, and with no copy of them: before these are written."""

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

    def refuses_graph(self) -> str:
        """Returns why steps cannot be captured as graphs, and what to give; empty where they can."""
        if self.name == "single":
            return ""
        return f"strategy {self.name!r} is not captured; give strategy='delayed_ddp', or 'single' with devices=1"

    def note_window(self, *, begun: bool) -> None:
        """Told whether the next forward goes on with a window that has ``begun``, where no forward before it has shown that.

        In a resumed run, where a window was dropped, and behind a replay of a CUDA graph.
        """

    def whole_gradients(self) -> dict[str, Tensor]:
        """Returns gradients of an open window that sharded parameters do not have yet, by name: stacked over ranks, one each."""
        return {}

    def places_of_whole_gradients(self) -> dict[str, Tensor]:
        """Returns what :meth:`whole_gradients` may return, without values; empty where gradients are not kept whole."""
        return {}

    def take_whole_gradients(self, stacked: dict[str, Tensor]) -> None:
        """Goes on with what :meth:`whole_gradients` returned on as many ranks."""

    def reduce_gradients(self, memory: GradientMemory | None = None) -> Gradients:
        """Ends the exchange of a window's gradients and says where the update finds them.

        ``memory`` None: those that the wrapped module's backward has exchanged on its way.  Else those of its parameters, which
        backward left local: its sums, or each ``.grad`` (manual optimization, and strategies that ask for them).
        """
        return IN_PLACE if memory is None else memory.local()

    def join(self, state: Callable[[], Tensor]) -> Tensor | None:
        """Takes its place among processes that come and go; returns the state that a fit goes on from, None where its own is.

        ``state`` returns this run's, for one that comes later; it is called between two steps, from another thread.
        """
        return None

    def begin_step(self) -> None:
        """Comes before the first batch of each window is read."""

    def end_steps(self) -> None:
        """Comes behind the last step of a fit that came to its limit."""

    def reduce(self, value: Tensor, reduce_op: str = "mean") -> Tensor:
        """Returns ``value`` reduced over the ranks by ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``, detached.

        Integers stay exact: their sum is int64, their mean float64.
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

    def on_rank_zero(self, action: Callable[[], Value]) -> Value:
        """Runs ``action`` on rank 0 alone and returns its answer (anything that pickles) on every rank.

        What it raises there is raised by every rank: an error of fabricamp's in its class and words, any other as a
        :class:`DistributedError` that quotes it.  One process raises whatever it is.
        """
        if self.world_size == 1:
            return action()
        answer: Any = None
        failure: FabricampError | None = None
        if self.rank == 0:
            try:
                answer = action()
            except FabricampError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the others, who wait for the answer, have to learn of it
                failure = DistributedError(f"rank 0 failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
        answer, told = self.broadcast((answer, failure and _portable(failure)))
        if told is not None:
            raise failure or told
        return cast("Value", answer)

    def agree(self, problem: FabricampError | None) -> None:
        """Raises on every rank where one has a ``problem``: the first one's class, the words of all; every rank calls it."""
        if self.world_size == 1:
            found = [] if problem is None else [problem]
        else:
            found = [one for one in self.all_gather_object(problem and _portable(problem)) if one is not None]
        if found:
            raise type(found[0])("; ".join(dict.fromkeys(map(str, found)))) from problem

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's state dict, the same on every rank; of what is sharded, each rank's part."""
        return module.state_dict()

    def barrier(self, name: str = "") -> None:
        """Waits for every rank."""

    def teardown(self) -> None:
        """Gives back what :meth:`setup_environment` took."""


def _portable(error: FabricampError) -> FabricampError:
    """``error`` in fabricamp's own class: that of a plugin or of the user may not pickle."""
    family: type[FabricampError] = next(
        one for one in type(error).__mro__ if one.__module__ == FabricampError.__module__
    )
    return family(str(error))


def check_reduction(op: str, value: Tensor) -> None:
    """Raises :class:`ConfigError` where ``value`` cannot be reduced by ``op``."""
    if op not in REDUCTIONS:
        known = ", ".join(repr(name) for name in REDUCTIONS)
        raise ConfigError(f"op={op!r} is no reduction{nearest(op, REDUCTIONS)} (known: {known})")
    if value.is_complex() and op in ("min", "max"):
        raise ConfigError(f"op={op!r} cannot order complex numbers ({value.dtype}); reduce their absolute values")


STRATEGIES: Registry[Strategy] = Registry("strategies", "strategy")
