"""What Fabric's methods take: numbers or tensors, one object or a list, filters by name, callbacks' signatures."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from fabricamp._utils.containers import with_parts
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_DTYPES: Final = {bool: torch.uint8, int: torch.int32, float: torch.float32}
"""As in Lightning."""


def listed(value: Any) -> list[Any]:
    """Returns a list of what was given as one object, several or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def from_environment(name: str, given: Any, default: Any) -> Any:
    """Returns an argument of Fabric: ``LT_NAME``, as ``fabric run --name=`` sets it, where the program left its default."""
    value = os.environ.get(f"LT_{name.upper()}")
    if value is None or str(given) == value:
        return given
    if given != default:
        raise ConfigError(f"Fabric({name}={given!r}), and LT_{name.upper()}={value}: give one of them")
    return value


def as_tensors(value: Any, device: torch.device) -> Any:
    """Returns the tensors, numbers and arrays of a collection as tensors; numbers on ``device``."""
    if isinstance(value, Tensor):
        return value
    if type(value) in _DTYPES:
        return torch.tensor(value, dtype=_DTYPES[type(value)], device=device)
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).to(device)
    return with_parts(value, lambda one: as_tensors(one, device))


def of_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns the collection with its tensors changed."""
    return change(value) if isinstance(value, Tensor) else with_parts(value, lambda one: of_tensors(one, change))


def number_of(name: str, value: Any) -> Any:
    """Returns the number in a tensor; other values as they are."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"log got {name!r}, a tensor of shape {tuple(value.shape)}; give one number, such as its mean()"
        )
    return value.item() if isinstance(value, Tensor) else value


def check_filter(given: Any, state: Mapping[str, Any]) -> Mapping[str, Callable[[str, Any], bool]]:
    """Returns the filter of ``save``; raises for one that is no dict of functions by names in ``state``."""
    found = {} if given is None else given
    if not isinstance(found, dict):
        raise TypeError(f"filter should be a dict of functions by the names in state, and is a {type(given).__name__}")
    for name, keep in found.items():
        if name not in state:
            raise ConfigError(f"filter has {name!r}, which is not in state: {sorted(state)}")
        if not callable(keep):
            raise TypeError(f"filter[{name!r}] should be a function of name and value, and is {keep!r}")
    return found


def state_of(value: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    """Returns an entry's state dict, of which ``keep(name, value)`` keeps a part; other entries as they are."""
    found = value.state_dict() if hasattr(value, "state_dict") else value
    if keep is None or not isinstance(found, dict):
        return found
    return {name: one for name, one in found.items() if keep(name, one)}


def in_signature(method: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Returns the keywords that ``method`` takes; all of them if it does not say."""
    if not keywords:
        return keywords
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return keywords
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}
