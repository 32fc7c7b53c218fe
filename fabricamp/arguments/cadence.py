"""Durations given as arguments."""

from __future__ import annotations

import re
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricamp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from fabricamp.strategies.base import Strategy


# ~~~ from arguments.durations: Durations given as arguments.


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


# ~~~ from callbacks._cadence: Decides when a checkpoint or a validation is due: every n steps, every n minutes of rank 0's clock, or both.


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


class Every(NamedTuple):
    """How often something is due; 0 and None mean never."""

    steps: int = 0
    epochs: int = 0
    interval: timedelta | None = None


def parse_every(text: str, name: str = "every") -> Every:
    """Parses the value of the argument ``name``, such as ``"100 steps, 1 epoch, 30 min"``.

    Raises :class:`ConfigError` if the text cannot be parsed.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", part)
        unit = "" if match is None else match[2].removesuffix("s") or "s"
        if match is None or unit not in _UNITS:
            hint = "" if match is None else nearest(match[2], (*_UNITS, *(f"{one}s" for one in _UNITS)))
            raise ConfigError(
                f"{name}={text!r}: {part.strip()!r} cannot be read{hint}; write it like '100 steps, 1 epoch, 30 min' (units: "
                f"{', '.join(_UNITS)})"
            )
        amount, kind = float(match[1]) * _SECONDS.get(unit, 1.0), unit if unit in ("step", "epoch") else "time"
        if kind in found or amount <= 0 or (kind != "time" and amount != int(amount)):
            raise ConfigError(
                f"{name}={text!r}: {part.strip()!r} is not allowed; give steps, epochs and a time at most once each, more than 0, "
                "steps and epochs as whole numbers"
            )
        found[kind] = amount
    interval = timedelta(seconds=found["time"]) if "time" in found else None
    return Every(int(found.get("step", 0)), int(found.get("epoch", 0)), interval)


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


def chosen_cadence(every: str | None, steps: int | None, epochs: int | None, interval: timedelta | None) -> Every:
    """Returns the cadence from ``every``, or from Lightning's three arguments with their default."""
    if every is None:
        others = steps or interval is not None
        return Every(steps or 0, int(not others) if epochs is None else epochs, interval)
    if any(one is not None for one in (steps, epochs, interval)):
        raise ConfigError(
            f"ModelCheckpoint(every={every!r}) is the whole schedule of saves: leave every_n_train_steps, train_time_interval and "
            "every_n_epochs out"
        )
    return parse_every(every)


def check_cadence(every: str | None, steps: int, epochs: int, interval: timedelta | None) -> None:
    """Raises :class:`ConfigError` for invalid lengths, and for several lengths without ``every``."""
    for name, length in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if length < 0:
            raise ConfigError(f"ModelCheckpoint({name}={length}): choose 1 or more, or 0 for never")
    if interval is not None and not (isinstance(interval, timedelta) and interval > timedelta(0)):
        raise ConfigError(
            f"ModelCheckpoint(train_time_interval={interval!r}): give a timedelta such as timedelta(minutes=30)"
        )
    lengths = {"every_n_train_steps": steps, "every_n_epochs": epochs, "train_time_interval": interval}
    given = [name for name, length in lengths.items() if length]
    if len(given) > 1 and every is None:
        raise ConfigError(
            f"ModelCheckpoint was given {' and '.join(given)}: choose one, or every='100 steps, 1 epoch, 30 min' for several"
        )


class Cadence:
    """Decides at which steps a checkpoint is due; every rank gets the same answer.

    Before step ``next_look`` none is due, and :meth:`is_due` need not be called.
    """

    def __init__(self, steps: int, interval: timedelta | None) -> None:
        self._steps = steps
        self._interval = interval.total_seconds() if interval is not None else 0.0
        self.start(0)

    def start(self, step: int) -> None:
        """Starts at ``step``; steps are counted from the run's first step, time from now."""
        self._since = time.monotonic()
        self._looked = (self._since, step)
        self._next_step = (step // self._steps + 1) * self._steps if self._steps else sys.maxsize
        self._next_glance = step + 1 if self._interval else sys.maxsize
        self.next_look = min(self._next_step, self._next_glance)

    def is_due(self, step: int, strategy: Strategy) -> bool:
        """Returns whether a checkpoint is due at ``step``; every rank calls this at the same steps."""
        due = step >= self._next_step
        if due:
            self._next_step += self._steps
        if step >= self._next_glance:
            due = self._time_is_up(step, strategy) or due
        self.next_look = min(self._next_step, self._next_glance)
        return due

    def _time_is_up(self, step: int, strategy: Strategy) -> bool:
        """Returns whether the interval has passed on rank 0's clock; a collective, called less often the more time is left."""
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
