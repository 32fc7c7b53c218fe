"""The registry of strategies: the names that ``Trainer(strategy=...)`` takes; libraries may register their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fabricamp.strategies import STRATEGIES, Strategy, strategy_from


class _StrategyRegistry(dict[str, Any]):
    """Maps a name such as "ddp" to a class, its description and the arguments with which :meth:`get` constructs it."""

    def register(
        self,
        name: str,
        strategy: Callable[..., Any] | None = None,
        description: str | None = None,
        override: bool = False,
        **init_params: Any,
    ) -> Callable[..., Any]:
        """Registers a class; ``Trainer(strategy=name)`` takes it if it derives from fabricamp's Strategy.

        Returns a decorator that registers if ``strategy`` is None.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a strategy is a string, not {name!r}")
        if name in self and not override:
            raise ValueError(f"the strategy {name!r} is registered already; give override=True to replace it")

        def add(kind: Callable[..., Any]) -> Callable[..., Any]:
            self[name] = {
                "description": description or "",
                "init_params": init_params,
                "strategy": kind,
                "strategy_name": name,
            }
            if isinstance(kind, type) and issubclass(kind, Strategy) and name not in STRATEGIES.names():
                STRATEGIES.add(name, functools.partial(self.get, name))
            return kind

        return add if strategy is None else add(strategy)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a new object of the class registered as ``name``, else ``default``; raises KeyError without a default."""
        if name in self:
            return self[name]["strategy"](**self[name]["init_params"])
        if default is None:
            raise KeyError(f"no strategy is called {name!r}; there are {sorted(self)}")
        return default

    def remove(self, name: str) -> None:
        """Removes a name."""
        self.pop(name)

    def available_strategies(self) -> list[str]:
        """Returns the registered names."""
        return list(self)

    def __str__(self) -> str:
        return f"Registered Strategies: {', '.join(self)}"


STRATEGY_REGISTRY = _StrategyRegistry()
_STARTS = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
_UNUSED = ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
for _name in ("single_device", "fsdp", *(start + unused for start in _STARTS for unused in _UNUSED)):
    STRATEGY_REGISTRY.register(_name, strategy_from, value=_name, world_size=1)
