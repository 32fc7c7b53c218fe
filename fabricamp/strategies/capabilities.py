"""What only some strategies do: keep the module in shards (:class:`Sharding`), or let processes come and go (:class:`Membership`).

Such a strategy has the class among its bases, and ``strategy.sharding`` or ``strategy.membership`` is the strategy itself.  For all
others they are :data:`UNSHARDED` and :data:`FIXED`, whose methods do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The settings of a run for a sharding strategy, mainly the dtypes of parameters."""

    compute_dtype: torch.dtype | None = None
    """The dtype in which parameters are gathered; None: their own."""
    stored_dtype: torch.dtype | None = None
    """Trained parameters are cast to it before sharding; None: they keep their dtype (as masters at O2 and O5)."""
    kept: Collection[nn.Module] = ()
    """The parameters of these modules themselves (without submodules) are gathered in their own dtype."""
    accumulates: bool = False
    """Whether steps have several micro-batches."""
    filled_later: bool = False
    """Whether weights of a checkpoint are loaded later; parameters then need no first values."""


class Sharding:
    """Keeps the module in shards; as it stands, every rank has the full module.

    Example:
        >>> from fabricamp.strategies import DDP, FSDP
        >>> FSDP().sharding.shards, DDP().sharding.shards
        (True, False)
    """

    shards: ClassVar[bool] = False
    """Whether each rank has only shards of the module.  A checkpoint is then a folder to which every rank writes its own."""

    owns_master_weights: ClassVar[bool] = False
    """Whether the shards are full-precision masters of the half parameters, so the precision makes none."""

    def shard_module(self, module: nn.Module, plan: ShardPlan) -> str:
        """Shards the module's parameters over the ranks; returns a line for the log.

        Called if :attr:`shards`, after ``configure_model`` and before weights of a checkpoint are loaded.
        """
        return ""

    def refuses_float8_gather(self) -> str:
        """Returns why no weights are gathered in FP8 (``Float8(all_gather=True)``); an empty string if they can be."""
        return "it gathers no weights in FP8; give strategy='fsdp', or leave all_gather out"

    def refuses_offload(self) -> str:
        """Returns why activations cannot wait in host memory (``Activations(offload=...)``); an empty string if they can."""
        return ""

    def allows_inference_mode(self) -> bool:
        """Whether evaluations may run in torch's inference mode; without it they run without gradients."""
        return True

    def settle_module(self, module: nn.Module) -> None:
        """Removes gathered copies, so ``module`` holds the parameters that optimizers update; called before they are written."""

    def unshard_module(self, module: nn.Module, *, whole: bool = True) -> None:
        """Undoes :meth:`shard_module` after a run; with ``whole`` rank 0 then has the full parameters, else no rank has."""

    def whole_gradients(self) -> dict[str, Tensor]:
        """Returns the full gradients of an accumulation in progress that are not scattered to shards yet, by name.

        Each is stacked over the ranks, with one entry per rank.
        """
        return {}

    def places_of_whole_gradients(self) -> dict[str, Tensor]:
        """Returns tensors like those of :meth:`whole_gradients`, without values; empty if full gradients are not kept."""
        return {}

    def take_whole_gradients(self, stacked: dict[str, Tensor]) -> None:
        """Resumes an accumulation from the result of :meth:`whole_gradients` on the same number of ranks."""


class Membership:
    """Lets processes join and leave during a run; as it stands, all of them stay to the end.

    Example:
        >>> from fabricamp.strategies import DDP, FaultTolerant
        >>> elastic = FaultTolerant(groups=2, group=0, lighthouse="http://localhost:29510")
        >>> elastic.membership.heals, DDP().membership.heals
        (True, False)
    """

    heals: ClassVar[bool] = False
    """Whether processes join and leave during a run; one that joins gets the others' state (:meth:`join`)."""

    def join(self, state: Callable[[], Tensor]) -> Tensor | None:
        """Joins the other processes; returns the state to continue the fit from, None to keep the own state.

        Called if :attr:`heals`.  ``state`` returns this run's state, for a process that joins later; it is called between two
        steps, from another thread.
        """
        return None

    def begin_step(self) -> None:
        """Called before the first batch of each step is read, if :attr:`heals`."""

    def end_steps(self) -> None:
        """Called after the last step of a fit that reached its limit."""


UNSHARDED: Final = Sharding()
"""The sharding of a strategy whose ranks have the full module."""

FIXED: Final = Membership()
"""The membership of a strategy whose processes stay the same in a run."""

_MEMBERS: Final = {
    capability: frozenset(name for name in vars(capability) if not name.startswith("_"))
    for capability in (Sharding, Membership)
}
_FORM: Final = "checkpoint_form"  # an own name for what follows from ``shards``


def check_class(cls: type) -> None:
    """Raises :class:`ConfigError` for a strategy's class that has members of a capability without the capability as a base.

    Nothing would ask for them.
    """
    if hasattr(cls, _FORM):
        raise ConfigError(
            f"{cls.__name__}.{_FORM} is read by nothing; for checkpoints that are folders write shards = True, with "
            f"{_name(Sharding)} among the bases"
        )
    for capability, members in _MEMBERS.items():
        found = sorted(name for name in members if hasattr(cls, name))
        if found and not issubclass(cls, capability):
            raise ConfigError(
                f"{cls.__name__} has {', '.join(found)}, and nothing asks for that without {_name(capability)} among the bases; "
                f"add it, as in class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)}, {capability.__name__})"
            )


def check_attribute(strategy: object, name: str) -> None:
    """Raises :class:`ConfigError` as :func:`check_class` does, for a member that is set on the object."""
    for capability, members in _MEMBERS.items():
        if name == _FORM or (name in members and not isinstance(strategy, capability)):
            raise ConfigError(
                f"{type(strategy).__name__} sets {name} on the object, where nothing reads it; set it in the class, "
                f"with {_name(capability)} among the bases"
            )


def _name(capability: type) -> str:
    return f"fabricamp.strategies.{capability.__name__}"
