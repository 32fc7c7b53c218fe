"""Strategies (data parallel, sharded): the processes of a run and the all-reduce of gradients; a name or an object."""

from __future__ import annotations

import re
from typing import Any

from fabricamp.arguments.not_offered import lightnings, part_of
from fabricamp.errors import ConfigError, without_address
from fabricamp.gradients.flat import IN_PLACE, Gradients
from fabricamp.strategies.base import STRATEGIES, Environment, Strategy
from fabricamp.strategies.capabilities import Membership, Sharding
from fabricamp.strategies.ddp import DDP
from fabricamp.strategies.ddp_strategy import DDPStrategy
from fabricamp.strategies.delayed_ddp import DelayedDDP
from fabricamp.strategies.fault_tolerant import FaultTolerant
from fabricamp.strategies.fsdp import FSDP
from fabricamp.strategies.process_group import ProcessGroupStrategy
from fabricamp.strategies.single_device import SingleDeviceStrategy

__all__ = [
    "DDP",
    "FSDP",
    "IN_PLACE",
    "STRATEGIES",
    "DDPStrategy",
    "DelayedDDP",
    "Environment",
    "FaultTolerant",
    "Gradients",
    "Membership",
    "ProcessGroupStrategy",
    "Sharding",
    "SingleDeviceStrategy",
    "Strategy",
    "strategy_from",
]

# By name, the classes that Lightning's scripts ask for: isinstance(trainer.strategy, DDPStrategy).
STRATEGIES.add("single", SingleDeviceStrategy)
STRATEGIES.add("ddp", DDPStrategy)
STRATEGIES.add("delayed_ddp", DelayedDDP)
STRATEGIES.add("fsdp", FSDP)
STRATEGIES.add("fault_tolerant", FaultTolerant)

_LIGHTNINGS_FORM = re.compile(r"ddp(?:_(spawn|fork|notebook))?(?:_find_unused_parameters_(true|false))?")


def __getattr__(name: str) -> Any:
    return part_of(__name__, name, __all__)


def strategy_from(value: object, world_size: int) -> Strategy:
    """Returns the strategy for ``Trainer(strategy=value)`` in a run of ``world_size`` processes.

    ``"auto"`` is ``"single"`` for one process and ``"ddp"`` for several.  Lightning's longer names are accepted too:
    ``"ddp_spawn"``, ``"ddp_fork"`` and ``"ddp_notebook"`` select how processes are started, and
    ``"ddp_find_unused_parameters_true"`` sets an option of :class:`DDP`; both can be combined.  Raises :class:`ConfigError` for
    unknown values, and for a one-process strategy with several processes.
    """
    if isinstance(value, str):
        automatic = "ddp" if world_size > 1 else "single"
        strategy = _lightnings_form(value) or STRATEGIES.build(automatic if value == "auto" else value)
    elif isinstance(value, Strategy):
        strategy = value
    else:
        hint = f"; write {value.__name__}()" if isinstance(value, type) and issubclass(value, Strategy) else ""
        names = ", ".join(repr(name) for name in ["auto", *STRATEGIES.names()])
        if words := lightnings(value):
            raise ConfigError(f"strategy: {words}")
        raise ConfigError(f"strategy={without_address(value)} is neither a name ({names}) nor a Strategy object{hint}")
    if world_size > 1 and not strategy.distributed:
        raise ConfigError(
            f"strategy={strategy.name!r} runs in one process, but devices and num_nodes ask for {world_size}; "
            "use strategy='ddp' (or 'auto'), or devices=1"
        )
    return strategy


def _lightnings_form(name: str) -> Strategy | None:
    """Returns the strategy of a Lightning name with options; None for any other name."""
    if name == "single_device":
        return SingleDeviceStrategy()
    match = _LIGHTNINGS_FORM.fullmatch(name)
    if match is None or name == "ddp":
        return None
    start_method, unused = match.groups()
    strategy = DDPStrategy(find_unused_parameters=unused == "true")
    strategy.start_method = "fork" if start_method == "notebook" else start_method
    return strategy
