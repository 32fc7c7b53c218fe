"""Durations and intervals given as arguments, and when a save or a validation is due: every n steps, every n minutes, or both.

:class:`Cadence` counts during a run; with minutes it reads rank 0's clock, so all ranks ask together (a broadcast).
"""

from __future__ import annotations

import re
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fabricamp.strategies.base import Strategy

_SECONDS = {
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "min": 60.0,
    "minute": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "day": 86400.0,
}
_UNITS = ("step", "epoch", *_SECONDS)


def as_seconds(name: str, value: object) -> float | None:
    """Returns the seconds of a duration: "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments; None for None.

    Raises :class:`ConfigError` that names the argument ``name``.
    """
    if value is None:
        return None
    length = value
    why = ""
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


class Every(NamedTuple):
    """How often something is due; 0 and None mean never."""

    steps: int = 0
    epochs: int = 0
    interval: timedelta | None = None


def parse_every(text: str, name: str = "every") -> Every:
    """Parses the value of the argument ``name``, such as ``"100 steps, 1 epoch, 30 min"``.

    Raises :class:`ConfigError` if the text cannot be parsed.
    """
    amounts: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", part)
        unit = "" if match is None else match[2].removesuffix("s") or "s"
        if match is None or unit not in _UNITS:
            plurals = [f"{unit}s" for unit in _UNITS]
            hint = "" if match is None else nearest(match[2], (*_UNITS, *plurals))
            raise ConfigError(
                f"{name}={text!r}: {part.strip()!r} cannot be read{hint}; write it like '100 steps, 1 epoch, 30 min' (units: "
                f"{', '.join(_UNITS)})"
            )
        kind = unit if unit in ("step", "epoch") else "time"
        amount = float(match[1]) * _SECONDS.get(unit, 1.0)
        is_fraction = kind != "time" and amount != int(amount)
        if kind in amounts or amount <= 0 or is_fraction:
            raise ConfigError(
                f"{name}={text!r}: {part.strip()!r} is not allowed; give steps, epochs and a time at most once each, more than 0, "
                "steps and epochs as whole numbers"
            )
        amounts[kind] = amount
    interval = timedelta(seconds=amounts["time"]) if "time" in amounts else None
    return Every(int(amounts.get("step", 0)), int(amounts.get("epoch", 0)), interval)


def validation_times(interval: str | dict[str, Any] | timedelta) -> Every:
    """Parses a ``val_check_interval`` given in words, as "DD:HH:MM:SS", as a timedelta or as a dict of its arguments."""
    if isinstance(interval, str) and ":" not in interval:
        return parse_every(interval, "val_check_interval")
    seconds = as_seconds("val_check_interval", interval)
    if not seconds:
        raise ConfigError(
            f"val_check_interval={interval!r} is not allowed; to leave validation out give limit_val_batches=0"
        )
    return Every(interval=timedelta(seconds=seconds))


class Cadence:
    """Decides at which steps a save or a validation is due: every ``steps``, and every ``interval`` of rank 0's clock.

    Every rank gets the same answer.  Before step ``next_look`` nothing is due, and :meth:`is_due` need not be called.
    """

    def __init__(self, steps: int, interval: timedelta | None) -> None:
        self._steps = steps
        self._interval = None if interval is None else interval.total_seconds()
        self.start(0)

    def start(self, step: int) -> None:
        """Starts at ``step``; steps are counted from the run's first step, time from now."""
        self._since = time.monotonic()
        self._looked = (self._since, step)  # when the clock was last compared, and at which step
        self._next_step = (step // self._steps + 1) * self._steps if self._steps else sys.maxsize
        self._next_glance = sys.maxsize if self._interval is None else step + 1
        self.next_look = min(self._next_step, self._next_glance)

    def is_due(self, step: int, strategy: Strategy) -> bool:
        """Returns whether a save or a validation is due at ``step``; every rank calls this at the same steps."""
        due = step >= self._next_step
        if due:
            self._next_step += self._steps
        if step >= self._next_glance:
            due = self._time_is_up(step, strategy) or due
        self.next_look = min(self._next_step, self._next_glance)
        return due

    def _time_is_up(self, step: int, strategy: Strategy) -> bool:
        """Returns whether the interval has passed on rank 0's clock; a collective, called less often the more time is left."""
        assert self._interval is not None
        now = time.monotonic()
        before, step_before = self._looked
        remaining = self._interval - (now - self._since)
        up = remaining <= 0
        if up:
            self._since = now
        steps_left = (self._interval if up else remaining) * (step - step_before) / max(now - before, 1e-9)
        # The next check comes after half of the estimated remaining steps, so a change of speed is noticed in time.
        ahead = max(1, int(min(steps_left / 2, 1e9)))
        up, self._next_glance = strategy.broadcast((up, step + ahead))
        self._looked = (now, step)
        return up
