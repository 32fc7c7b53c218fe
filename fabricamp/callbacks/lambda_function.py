"""Calls plain functions as hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError, UnknownArgumentError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

_HOOKS = [name for name in dir(Callback) if name in {"setup", "teardown"} or name.startswith("on_")]


class LambdaCallback(Callback):
    """Calls your functions as hooks; hooks that are not given cost nothing.

    Args:
        **hooks: functions, by the names and with the arguments of :class:`Callback`'s hooks.

    Raises:
        ConfigError: for an unknown hook, or anything but a function.

    Example:
        >>> callback = LambdaCallback(on_train_epoch_end=lambda trainer, pl_module: print(trainer.current_epoch))
    """

    def __init__(self, **hooks: Callable[..., object] | None) -> None:
        super().__init__()
        for name, call in hooks.items():
            if name not in _HOOKS:
                raise UnknownArgumentError(f"LambdaCallback: {name!r} is not a hook{nearest(name, _HOOKS)}")
            if call is None:
                continue
            if not callable(call):
                raise ConfigError(
                    f"LambdaCallback({name}={call!r}) is not a function; give one that takes the hook's arguments"
                )
            setattr(self, name, call)
