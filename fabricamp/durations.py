"""How long something may take."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fabricamp.errors import ConfigError


def as_seconds(value: Any, name: str) -> float | None:
    """Returns the seconds of the argument ``name``: "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments."""
    try:
        if value is None:
            return None
        if isinstance(value, str):
            days, hours, minutes, seconds = (int(part) for part in value.split(":"))
            value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(value, dict):
            value = timedelta(**value)
        if isinstance(value, timedelta) and value >= timedelta(0):
            return value.total_seconds()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}={value!r} is not allowed ({error}); give 'DD:HH:MM:SS', a timedelta or a dict such as {{'hours': 2}}"
        ) from error
    raise ConfigError(
        f"{name}={value!r} is not allowed; give 'DD:HH:MM:SS', a timedelta or a dict such as {{'hours': 2}}"
    )
