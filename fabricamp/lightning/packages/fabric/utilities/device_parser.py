"""Checks of ``devices=``."""

from __future__ import annotations

from typing import Any

from fabricamp.errors import ConfigError


def _check_data_type(device_ids: object) -> None:
    """Raises TypeError unless ``devices`` is a number, a string or a list or tuple of numbers."""
    numbers = device_ids if isinstance(device_ids, (list, tuple)) else []
    if device_ids is None or isinstance(device_ids, bool) or not isinstance(device_ids, (int, str, list, tuple)):
        raise TypeError(f"devices={device_ids!r} is neither a number, a string nor a list of numbers")
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"devices={device_ids!r} is a list of other things than numbers")


def _check_unique(device_ids: list[int]) -> None:
    """Raises :class:`ConfigError` if a device is named twice."""
    if len(set(device_ids)) < len(device_ids):
        raise ConfigError(f"devices={device_ids!r} names a device twice; each process needs one of its own")


def _normalize_parse_gpu_string_input(s: int | str | list[int]) -> Any:
    """Returns the number or the list of numbers in a string; other values unchanged."""
    if not isinstance(s, str):
        return s
    if s.strip() == "-1":
        return -1
    return [int(part) for part in s.split(",") if part.strip()] if "," in s else int(s.strip())
