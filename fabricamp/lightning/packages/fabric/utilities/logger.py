"""Flattens and converts hyper-parameters and metrics for loggers."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor


def _convert_params(params: Any) -> dict[str, Any]:
    """Returns hyper-parameters as a dict."""
    converted: dict[str, Any] = vars(params) if isinstance(params, Namespace) else params or {}
    return converted


def _flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Flattens nested dicts, dataclasses and namespaces by joining keys: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent_key}{delimiter}{key}" if parent_key else str(key)
        nested = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        nested = vars(nested) if isinstance(nested, Namespace) else nested
        if isinstance(nested, list) and all(isinstance(item, Mapping) for item in nested):
            nested = dict(enumerate(nested))
        if isinstance(nested, Mapping):
            flat |= _flatten_dict(nested, delimiter, name)
        else:
            flat[name] = nested
    return flat


def _sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns ``params``, changed in place: values become strings, except numbers, bools, strings and tensors."""
    for key, value in params.items():
        plain = value.item() if isinstance(value, (np.bool_, np.integer, np.floating)) else value
        params[key] = plain if type(plain) in (bool, int, float, str, Tensor) else str(plain)
    return params


def _sanitize_callable_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns ``params`` with classes replaced by their names, and functions by their results or, if a call fails, their names."""
    return {key: _named(value) for key, value in params.items()}


def _named(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    if not callable(value):
        return value
    try:
        result = value()
    except Exception:  # noqa: BLE001 - a function that needs arguments is shown by its name
        return getattr(value, "__name__", None)
    return value.__name__ if callable(result) else result


def _convert_json_serializable(params: dict[str, Any]) -> dict[str, Any]:
    """Returns ``params`` with strings in place of values that JSON cannot hold."""
    return {key: value if _is_json_serializable(value) else str(value) for key, value in params.items()}


def _is_json_serializable(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str, list, dict)):
        return True
    try:
        json.dumps(value)
    except (TypeError, OverflowError):
        return False
    return True


def _add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Returns ``metrics`` with a prefix before each name, or unchanged without a prefix."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics
