"""The callbacks and loggers that a Trainer was given."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from fabricamp import callbacks
from fabricamp.callbacks.base import CALLBACKS, Callback
from fabricamp.errors import ConfigError, without_address
from fabricamp.lightning.given import adopted, runs_as_it_is
from fabricamp.loggers.base import Logger
from fabricamp.not_offered import lightnings


def as_callbacks(value: Any) -> list[Callback]:
    """Returns a list of callbacks from one, several, names among them, or None."""
    given = [] if value is None else _listed(value)
    found = [_by_name(one) if isinstance(one, str) else adopted(one) for one in given]
    for one in found:
        if not (isinstance(one, Callback) or runs_as_it_is(one)):
            hint = f"; give an instance: {one.__name__}(...)" if isinstance(one, type) else ""
            raise ConfigError(
                f"callbacks: {words}"
                if (words := lightnings(one))
                else f"callbacks holds {without_address(one)}, which is not a fabricamp Callback{hint}"
            )
    keys = [one.state_key for one in found]
    for one, key in zip(found, keys, strict=True):
        if keys.count(key) > 1 and one.state_dict():
            raise ConfigError(
                f"two callbacks have the state key {key!r}; give them different arguments, or override state_key"
            )
    return found


def _listed(value: Any) -> list[Any]:
    """One, or several in any sequence: hydra's ``instantiate`` gives lists of a class of its own."""
    return [*value] if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _by_name(name: str) -> Callback:
    """The callback that a third party has registered under ``name``."""
    if name in CALLBACKS.names():
        return CALLBACKS.build(name)
    matches = difflib.get_close_matches(name, callbacks.__all__, n=1)
    meant = matches[0] if matches else "ModelCheckpoint"
    raise ConfigError(
        f"callbacks={name!r} is a name that nobody has registered; write callbacks=[{meant}(...)], in a configuration "
        f"_target_: fabricamp.callbacks.{meant}"
    )


def as_loggers(value: Any) -> list[Logger] | None:
    """Returns a list of loggers; None stands for the default one (``True`` or None given), ``False`` for none."""
    if value is None or value is True:
        return None
    given = [] if value is False else _listed(value)
    given = [adopted(one) for one in given]
    for one in given:
        if not isinstance(one, Logger):
            raise ConfigError(
                f"logger: {words}"
                if (words := lightnings(one))
                else f"logger={without_address(one)} is not a fabricamp Logger; give one, a list of "
                "them, True (TensorBoard) or False"
            )
    return given
