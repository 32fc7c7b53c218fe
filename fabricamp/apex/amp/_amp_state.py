"""The one state of amp in a process: what ``initialize`` chose, the loss scalers, and what it has changed so far."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from fabricamp.errors import ConfigError
from fabricamp.optimizers.parameters import owned_parameters

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
    """What amp refuses; a ``RuntimeError``, as apex's users expect."""


class AmpState:
    """What scripts read and set of amp's state; attributes without a value here appear with ``initialize``."""

    opt_properties: Properties
    loss_scalers: list[LossScaler]
    handle: AmpHandle
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        # Weak: a model that its script has dropped takes its masters and hooks with it.
        self.conversions: WeakKeyDictionary[nn.Module, Conversion] = WeakKeyDictionary()
        self.models: WeakSet[nn.Module] = WeakSet()
        self.optimizers: WeakSet[AmpOptimizerState] = WeakSet()

    def forget(self) -> None:
        """Goes back to how it was before the first ``initialize``."""
        for name in ("opt_properties", "loss_scalers", "handle", "min_loss_scale", "max_loss_scale"):
            self.__dict__.pop(name, None)
        self.models.clear()


_amp_state = AmpState()


def is_rank_zero() -> bool:
    """Returns whether this process is the first of all, or the only one."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Prints ``msg`` where verbosity allows; with ``rank0`` on the first process only."""
    if _amp_state.verbosity > 0 and (not rank0 or is_rank_zero()):
        print(msg)  # where apex's messages go, and scripts look for them


def warn_or_err(msg: str) -> None:
    """Raises :class:`AmpError`, or only prints where ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise AmpError(msg)
    maybe_print(f"Warning:  {msg}")


def master_params(optimizer: Optimizer) -> Iterator[Any]:
    """Yields what ``optimizer`` updates: fp32 masters where the model is half, with unscaled gradients after ``scale_loss``."""
    yield from owned_parameters(optimizer)
