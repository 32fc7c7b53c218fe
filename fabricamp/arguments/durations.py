"""Durations given as arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fabricamp.errors import ConfigError


def as_seconds(name: str, value: Any) -> float | None:
    """Returns the seconds of a duration: "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments; None for None.

    Raises :class:`ConfigError` that names the argument ``name``.
    """
    if value is None:
        return None
    length, why = value, ""
    try:
        if isinstance(value, str):
            days, hours, minutes, seconds = (int(part) for part in value.split(":"))
            length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(value, dict):
            length = timedelta(**value)
    except (TypeError, ValueError) as error:
        why = f" ({error})" if isinstance(value, dict) else ""
    if isinstance(length, timedelta) and length >= timedelta(0):
        return length.total_seconds()
    raise ConfigError(
        f"{name}={value!r} is not allowed{why}; give 'DD:HH:MM:SS', a timedelta or a dict such as {{'hours': 2}}"
    )
