"""Checks the types of callback arguments, before their values are compared."""

from __future__ import annotations

import numbers
import os
from typing import Any

from fabricamp.errors import ConfigError

_KINDS: dict[str, tuple[type, ...]] = {
    "a string": (str,),
    "a path": (str, os.PathLike),
    "a whole number": (numbers.Integral,),
    "a number": (numbers.Real,),
    "True or False": (bool,),
}


def check_kind(owner: object, kind: str, *, optional: bool = False, **given: Any) -> None:
    """Raises :class:`ConfigError` for the first argument in ``given`` that is not of ``kind``; ``optional`` also allows None."""
    for name, value in given.items():
        fits = isinstance(value, _KINDS[kind]) and isinstance(value, bool) is (kind == "True or False")
        if not fits and not (optional and value is None):
            allowed = f"{kind} or None" if optional else kind
            raise ConfigError(f"{type(owner).__name__}({name}={value!r}): give {allowed}")
