"""Mixed precision by torch.autocast, as a reusable context, and the user's registered half, float and promote functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fabricamp._utils.containers import tensors_within
from fabricamp.errors import ConfigError, nearest
from fabricamp.precision.casting import cast_tensors

Function = TypeVar("Function", bound="Callable[..., Any]")
Rule = Literal["half", "float", "promote"]
_RULE = "_fabricamp_rule"
_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


class Autocast:
    """A torch.autocast context that can be entered repeatedly and nested.

    It is made once, because construction costs more than entering.  torch drops its cache of half weights at the outermost exit,
    so the cache does not outlive a step.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, *, enabled: bool = True) -> None:
        self._options: dict[str, Any] = {"device_type": device_type, "dtype": dtype, "enabled": enabled}
        self._first = torch.autocast(**self._options)
        self._entered: list[torch.autocast] = []

    def __enter__(self) -> None:
        # torch's object saves only one previous state, so a nested entry needs another object.
        context = torch.autocast(**self._options) if self._entered else self._first
        self._entered.append(context)
        context.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._entered.pop().__exit__(*raised)


def without_autocast(device_type: str) -> Autocast:
    """Returns a context that disables autocast, for backward and updates called inside the step."""
    return Autocast(device_type, torch.get_autocast_dtype(device_type), enabled=False)


def half_function(function: Function) -> Function:
    """Decorates ``function``: autocast casts its floating arguments, also nested ones, to autocast's dtype.  fp64 stays."""
    return _with_rule(function, "half")


def float_function(function: Function) -> Function:
    """Decorates ``function``: autocast casts its half arguments, also nested ones, to fp32, and is disabled inside."""
    return _with_rule(function, "float")


def promote_function(function: Function) -> Function:
    """Decorates ``function``: autocast casts its floating arguments, also nested ones, to the widest dtype among them."""
    return _with_rule(function, "promote")


def register_half_function(module: ModuleType | type, name: str) -> None:
    """Replaces ``module.name`` by a :func:`half_function` of it."""
    _register(module, name, "half")


def register_float_function(module: ModuleType | type, name: str) -> None:
    """Replaces ``module.name`` by a :func:`float_function` of it."""
    _register(module, name, "float")


def register_promote_function(module: ModuleType | type, name: str) -> None:
    """Replaces ``module.name`` by a :func:`promote_function` of it."""
    _register(module, name, "promote")


def _register(module: ModuleType | type, name: str, rule: Rule) -> None:
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"No function named {name} in module {module.__name__}{nearest(name, dir(module))}")
    while getattr(function, _RULE, None) is not None:  # registered before: the new rule replaces the old one
        function = function.__wrapped__
    setattr(module, name, _with_rule(function, rule))


def _with_rule(function: Function, rule: Rule) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for tensor in tensors_within((args, kwargs)) if tensor.is_floating_point()]
        device_type = tensors[0].device.type if tensors else "cpu"
        if not tensors or not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        args, kwargs = _cast_for(rule, tensors, device_type, args, kwargs)
        if rule != "float":
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    setattr(run, _RULE, rule)
    return run  # type: ignore[return-value]  # the same signature


def _cast_for(rule: Rule, tensors: list[Tensor], device_type: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if rule == "promote":
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    else:
        dtype = torch.get_autocast_dtype(device_type) if rule == "half" else torch.float32

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in _CASTABLE else tensor

    return cast_tensors(args, cast, dtype), cast_tensors(kwargs, cast, dtype)
