"""amp's global state: the options of ``initialize``, the loss scalers, and the converted models and optimizers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from fabricamp.errors import ConfigError
from fabricamp.optimizers.refusals import owned_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

    from fabricamp.apex.amp._initialize import Conversion
    from fabricamp.apex.amp._stash import AmpOptimizerState
    from fabricamp.apex.amp.frontend import Properties
    from fabricamp.apex.amp.handle import AmpHandle
    from fabricamp.apex.amp.scaler import LossScaler

logger = logging.getLogger("fabricamp")


class AmpError(ConfigError, RuntimeError):
    """amp cannot work in this way; this error is a ``RuntimeError``, as apex's users expect."""


class AmpState:
    """amp's state that scripts read and set; ``initialize`` sets the attributes that have no value here."""

    opt_properties: Properties
    loss_scalers: list[LossScaler]
    handle: AmpHandle
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        # Weak references: when the script drops a model, its masters and hooks are freed too.
        self.conversions: WeakKeyDictionary[nn.Module, Conversion] = WeakKeyDictionary()
        self.models: WeakSet[nn.Module] = WeakSet()
        self.optimizers: WeakSet[AmpOptimizerState] = WeakSet()

    def forget(self) -> None:
        """Resets the state to that before the first ``initialize``; keeps switches that scripts set."""
        for name in ("opt_properties", "loss_scalers", "handle", "min_loss_scale", "max_loss_scale"):
            self.__dict__.pop(name, None)
        self.models.clear()


_amp_state = AmpState()


def is_rank_zero() -> bool:
    """Returns whether this process is rank 0, or the only one."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints ``msg`` if verbosity is above 0; with ``rank0`` on rank 0 only."""
    if _amp_state.verbosity > 0 and (not rank0 or is_rank_zero()):
        print(msg)  # on stdout, as in apex, where scripts look for messages


def warn_or_err(msg: str) -> None:
    """Raises :class:`AmpError`; only prints a warning if ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise AmpError(msg)
    maybe_print(f"Warning:  {msg}")


def master_params(optimizer: Optimizer) -> Iterator[Any]:
    """Returns the parameters that ``optimizer`` updates: masters for half models, with unscaled gradients after ``scale_loss``."""
    return iter(owned_parameters(optimizer))
