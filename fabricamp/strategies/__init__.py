"""Where the processes are, and how gradients travel between them: by name or as an object with options."""

from __future__ import annotations

from fabricamp.errors import ConfigError
from fabricamp.strategies.base import IN_PLACE, STRATEGIES, Environment, Gradients, Strategy
from fabricamp.strategies.ddp import DDP
from fabricamp.strategies.delayed_ddp import DelayedDDP
from fabricamp.strategies.process_group import ProcessGroupStrategy
from fabricamp.strategies.scripts import DistributedDataParallel, Reducer

__all__ = [
    "DDP",
    "IN_PLACE",
    "STRATEGIES",
    "DelayedDDP",
    "DistributedDataParallel",
    "Environment",
    "Gradients",
    "ProcessGroupStrategy",
    "Reducer",
    "Strategy",
    "strategy_from",
]

STRATEGIES.add("single", Strategy)
STRATEGIES.add("ddp", DDP)
STRATEGIES.add("delayed_ddp", DelayedDDP)


def strategy_from(value: object, world_size: int) -> Strategy:
    """Returns the strategy that ``Trainer(strategy=value)`` means in a run of ``world_size`` processes.

    ``"auto"`` is ``"single"`` for one process and ``"ddp"`` for several.
    """
    if isinstance(value, str):
        automatic = "ddp" if world_size > 1 else "single"
        strategy = STRATEGIES.build(automatic if value == "auto" else value)
    elif isinstance(value, Strategy):
        strategy = value
    else:
        hint = f"; write {value.__name__}()" if isinstance(value, type) and issubclass(value, Strategy) else ""
        names = ", ".join(repr(name) for name in ["auto", *STRATEGIES.names()])
        raise ConfigError(f"strategy={value!r} is neither a name ({names}) nor a Strategy object{hint}")
    if world_size > 1 and not strategy.distributed:
        raise ConfigError(
            f"strategy={strategy.name!r} runs in one process, but devices and num_nodes ask for {world_size}; "
            "use strategy='ddp' (or 'auto'), or devices=1"
        )
    return strategy
