"""fabricamp's error classes, and the functions that build their hints."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable

from fabricamp.arguments.migration import meanings


class FabricampError(Exception):
    """The base class of fabricamp's errors."""


class ConfigError(FabricampError, ValueError):
    """An argument, or a combination of arguments, module, data and machine, that cannot work."""


class UnknownArgumentError(ConfigError, TypeError):
    """An unknown keyword argument; this error is a TypeError too."""


class DistributedError(FabricampError, RuntimeError):
    """Ranks disagree, or a rank has died."""


class CheckpointError(FabricampError, RuntimeError):
    """A checkpoint that cannot be written, read or used for what was asked."""


class MissingCheckpointError(CheckpointError, ValueError):
    """There is no best or last checkpoint; this error is a ValueError too."""


class NonFiniteError(FabricampError, RuntimeError):
    """Gradients are inf or nan, and training cannot or must not continue."""


def nearest(given: object, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'name'?"`` for the known name nearest to ``given``, or "" if none is similar."""
    matches = difflib.get_close_matches(str(given), sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def meant(where: str, given: object, value: object = None) -> str:
    """Returns ``"; write ..."`` for a name of another trainer given at ``where`` (a table of migration.toml), or ""."""
    name = str(given).lower().removeprefix("torch.")
    for pattern, words in meanings(where).items():
        if fnmatch.fnmatchcase(name, pattern):
            return f"; {words.format(name=name, value=repr(given if value is None else value))}"
    return ""


def advice(where: str, given: object, known: Iterable[str], value: object = None) -> str:
    """Returns a hint what to write instead of ``given``: by migration.toml, else the nearest of ``known``, else all of them."""
    known = list(known)
    return meant(where, given, value) or nearest(given, known) or f" (known: {', '.join(known) or 'none'})"


def without_address(value: object) -> str:
    """Returns the repr of ``value``, or the name of its class if the repr contains an address."""
    shown = repr(value)
    return f"a {type(value).__name__}" if " object at 0x" in shown else shown
