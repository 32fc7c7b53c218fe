"""Checks of arguments: whole numbers, flags, choices and names, and the types of callbacks' arguments.

Each returns the value if there is one to use, or raises ConfigError with the allowed values.
"""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, cast

from fabricamp.errors import ConfigError, advice, nearest

NO_LIMIT = -1
"""The value of ``max_epochs`` and ``max_steps`` that means no limit."""

_KINDS: dict[str, tuple[type, ...]] = {
    "a string": (str,),
    "a path": (str, os.PathLike),
    "a whole number": (numbers.Integral,),
    "a number": (numbers.Real,),
    "True or False": (bool,),
}


def check_count(
    name: str, value: Any, *, least: int, owner: str = "", endless: bool = False, optional: bool = False
) -> int | None:
    """Returns a whole number from ``least``; ``endless`` also allows -1, ``optional`` also allows None.

    ``owner``: the class whose argument it is, for the message.
    """
    if value is None and optional:
        return None
    whole = whole_number(value)
    if whole == NO_LIMIT and endless:
        return NO_LIMIT
    if whole is None or whole < least:
        allowed = f"a whole number from {least}"
        if endless:
            allowed += ", or -1 for no limit"
        if optional:
            allowed += ", or None"
        raise _not_allowed(owner, name, value, allowed)
    return whole


def whole_number(value: object) -> int | None:
    """Returns a whole number of any type, such as NumPy's, as an int; None for a flag and anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def check_number(name: str, value: object, *, least: int, owner: str = "", endless: bool = False) -> int:
    """Returns a whole number from ``least``; ``endless`` also allows -1."""
    return check_count(name, value, least=least, owner=owner, endless=endless) or 0


def check_flag(name: str, value: object, *, owner: str = "", others: tuple[Any, ...] = ()) -> Any:
    """Returns True, False or one of ``others``; ``owner``: the class whose argument it is, for the message."""
    if isinstance(value, bool) or (value in others and not isinstance(value, int)):
        return value
    *first, last = map(repr, (True, False, *others))
    raise _not_allowed(owner, name, value, f"{', '.join(first)} or {last}")


def _not_allowed(owner: str, name: str, value: object, allowed: str) -> ConfigError:
    given = f"{owner}({name}={value!r})" if owner else f"{name}={value!r}"
    return ConfigError(f"{given} is not allowed; give {allowed}")


def check_choice(name: str, value: object, choices: tuple[Any, ...]) -> Any:
    """Returns ``value`` if it is one of ``choices``."""
    if value not in choices:
        known = [choice for choice in choices if isinstance(choice, str)]
        allowed = ", ".join(map(repr, choices))
        raise ConfigError(f"{name}={value!r} is not known{nearest(value, known)} (known: {allowed})")
    return value


def check_names(words: str, given: Iterable[str], known: Sequence[str], *, where: str = "") -> None:
    """Raises ConfigError for the first name of ``given`` not in ``known``: ``words``, the name, and a hint (see :func:`advice`)."""
    for name in given:
        if name not in known:
            raise ConfigError(f"{words} {name!r}{advice(where, name, known)}")


def check_kind(owner: object, kind: str, *, optional: bool = False, **given: Any) -> None:
    """Raises :class:`ConfigError` for the first argument in ``given`` that is not of ``kind``; ``optional`` also allows None."""
    for name, value in given.items():
        if optional and value is None:
            continue
        is_bool = isinstance(value, bool)  # a bool is an int, too
        if not isinstance(value, _KINDS[kind]) or is_bool is not (kind == "True or False"):
            allowed = f"{kind} or None" if optional else kind
            raise _not_allowed(type(owner).__name__, name, value, allowed)
