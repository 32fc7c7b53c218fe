"""fabricamp's error classes, and the functions that build their hints."""

from __future__ import annotations

import difflib
import errno
import fnmatch
import os
import pickle
from collections.abc import Iterable

from fabricamp.arguments.migration import meanings


class FabricampError(Exception):
    """The base class of fabricamp's errors."""


class ConfigError(FabricampError, ValueError):
    """An argument, or a combination of arguments, module, data and machine, that cannot work."""


class UnknownArgumentError(ConfigError, TypeError):
    """An unknown keyword argument; this error is a TypeError too."""


class ModuleTypeError(ConfigError, TypeError):
    """An entry point got no module, or something else in its place; this error is a TypeError too."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument, or what a method returned, has a wrong type; this error is a TypeError too."""


class MissingAttributeError(ConfigError, AttributeError):
    """A search found no attribute to set; this error is an AttributeError too."""


class NothingToSaveError(ConfigError, AttributeError):
    """A Trainer is to save a checkpoint, and has run no module yet; this error is an AttributeError too."""


class NotInstalledError(ConfigError, ModuleNotFoundError):
    """A logger or callback needs a package that is not installed; this error is a ModuleNotFoundError too."""


class NotCapturableError(ConfigError):
    """The reason why a step cannot be captured as a CUDA graph, and what to change; ``cuda_graph="auto"`` then runs it eagerly."""


class OptimizationError(ConfigError, RuntimeError):
    """Optimizers or steps that automatic, or manual, optimization cannot run; this error is a RuntimeError too."""


class DuplicateCallbackError(ConfigError, RuntimeError):
    """Two callbacks have one key for their states; this error is a RuntimeError too."""


class FileThereError(ConfigError, RuntimeError):
    """A file is there that the run would replace; this error is a RuntimeError too."""


class NotAttachedError(ConfigError, RuntimeError):
    """A module needs its Trainer and has none; this error is a RuntimeError too."""


class NoThreadError(ConfigError, RuntimeError):
    """The system starts no thread that the run needs; this error is a RuntimeError too."""


class MissingMetricError(ConfigError, RuntimeError):
    """A metric that a callback needs was not logged; this error is a RuntimeError too."""


class HyperparameterConflictError(ConfigError, RuntimeError):
    """Module and DataModule have different hyper-parameters of one name; this error is a RuntimeError too."""


class DistributedError(FabricampError, RuntimeError):
    """Ranks disagree, or a rank has died."""


class CheckpointError(FabricampError, RuntimeError):
    """A checkpoint that cannot be written, read or used for what was asked."""


class MissingCheckpointError(CheckpointError, ValueError):
    """There is no best or last checkpoint; this error is a ValueError too."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no file at a checkpoint's path; this error is a FileNotFoundError too, with ``errno`` and ``filename``."""

    def __init__(self, message: str, filename: str | None = None) -> None:
        super().__init__(message)
        self.errno = errno.ENOENT
        self.strerror = os.strerror(errno.ENOENT)
        self.filename = filename

    def __str__(self) -> str:
        """Returns the message, without the number of the error."""
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[CheckpointNotFoundError], tuple[str, str | None]]:
        return type(self), (str(self), self.filename)


class CheckpointObjectsError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint holds objects, and the call does not allow code to rebuild them; this error is an UnpicklingError too.

    The file is not damaged, so ``ckpt_path="auto"``, ``"last"`` and ``"best"`` try no other file.
    """


class WeightsOnlyError(CheckpointError, KeyError):
    """A checkpoint has no state to resume from; this error is a KeyError too."""

    def __str__(self) -> str:
        """Returns the message, which KeyError would show as a repr."""
        return str(self.args[0])


class NonFiniteError(FabricampError, RuntimeError):
    """Gradients are inf or nan, and training cannot or must not continue."""


def reworded(error: FabricampError, message: str, family: type[FabricampError] | None = None) -> FabricampError:
    """Returns an error with another message, of the same class or of ``family``; the file name of a missing checkpoint stays."""
    result = (family or type(error))(message)
    if isinstance(result, CheckpointNotFoundError):
        result.filename = getattr(error, "filename", None)
    return result


_CLOSE = 0.65
"""How alike two names have to be for a guess: one of three letters may differ (``dpp``), ``num_worker`` is not ``num_nodes``."""


def nearest(given: object, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'name'?"`` for the known name nearest to ``given``, or "" if none is similar."""
    matches = difflib.get_close_matches(str(given), sorted(known), n=1, cutoff=_CLOSE)
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
