"""Checks which parameters a hook takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Returns whether a method takes ``param`` by name, or ``min_args`` arguments, or ``*args`` unless ``explicit``."""
    specification = inspect.getfullargspec(getattr(hook_fx, "__wrapped__", hook_fx))
    names = specification.args[1:]
    by_position = not explicit and specification.varargs is not None
    return param in names or by_position or (min_args is not None and len(names) >= min_args)
