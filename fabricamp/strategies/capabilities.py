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

_FORM: Final = "checkpoint_form"
_FORMS: Final = {"file": False, "folder": True}


def adopt_capabilities(cls: type) -> None:
    """Gives a new class of a strategy the capabilities whose members it overrides, among its bases.

    Strategies written for earlier versions need it: these members were those of ``Strategy``, which such a class overrides and
    calls through ``super()``.  Raises :class:`ConfigError` for a ``checkpoint_form`` other than "file" and "folder", which is the
    earlier name of :attr:`Sharding.shards`.
    """
    if _FORM in vars(cls):
        form = vars(cls)[_FORM]
        if form not in _FORMS:
            raise ConfigError(
                f"{cls.__name__}.checkpoint_form={form!r} has to be 'file' or 'folder'; or write shards = True, with "
                "fabricamp.strategies.Sharding among the bases"
            )
        cls.shards = _FORMS[form]  # type: ignore[attr-defined]  # a class variable of Sharding
    for capability in (Sharding, Membership):
        members = (name for name in vars(capability) if not name.startswith("_"))
        if not issubclass(cls, capability) and any(hasattr(cls, name) for name in members):
            # Last in the order of the classes: it overrides nothing, and super() finds its methods.
            cls.__bases__ = (*cls.__bases__, capability)


def check_members(strategy: object) -> None:
    """Raises :class:`ConfigError` for a capability's members that are set on the object of a strategy without the capability.

    Nothing would read them there.
    """
    for capability in (Sharding, Membership):
        members = {name for name in vars(capability) if not name.startswith("_")}
        is_set = sorted((members | {_FORM}) & vars(strategy).keys())
        if is_set and not isinstance(strategy, capability):
            raise ConfigError(
                f"{type(strategy).__name__} sets {', '.join(is_set)} on the object, where nothing reads it; set it in the class, "
                f"with fabricamp.strategies.{capability.__name__} among the bases"
            )


def earlier_member(sharding: Sharding, membership: Membership, name: str) -> object:
    """Returns the member of a capability that was one of ``Strategy`` in earlier versions; raises AttributeError for others."""
    if name == _FORM:
        return "folder" if sharding.shards else "file"
    for capability, part in ((Sharding, sharding), (Membership, membership)):
        if name in vars(capability) and not name.startswith("_"):
            return getattr(part, name)
    raise AttributeError(name)
