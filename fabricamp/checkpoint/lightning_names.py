"""Pickles for Lightning: in files of programs written for Lightning, fabricamp's classes have Lightning's names.

Lightning, or other code that knows only Lightning's names, may load such a file.  Objects with the same pickled state in both
packages (``hparams``, enums, ...) are named ``lightning.pytorch...``, and so are classes and functions that are pickled by name.
All other objects of fabricamp are refused: Lightning could not rebuild them.  ``lightning_names.toml`` has the names.  The
``__module__`` of the classes does not change, so other pickles, such as those for spawned ranks, keep fabricamp's names.

A pickler calls :func:`refuse_unnamed` in its ``reducer_override`` and passes its opcodes through :func:`renamed`;
:class:`Unpickler` finds fabricamp's classes under both names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import pickletools
import tomllib
from importlib import resources
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricamp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL: Final = 2
"""torch.save's.  Its pickles name each class in one opcode, without a length, and have no frames: a name can be replaced."""

_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType)


@functools.cache
def _table() -> dict[str, dict[str, str]]:
    text = resources.files(__package__).joinpath("lightning_names.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def same_state() -> dict[str, str]:
    """Returns Lightning's name of each class whose objects have the same pickled state there."""
    return _table()["same_state"]


@functools.cache
def lightnings_names() -> dict[str, str]:
    """Returns Lightning's name of each class and function that has one."""
    return {**_table()["by_name"], **same_state()}


@functools.cache
def _our_names() -> dict[str, str]:
    """Returns fabricamp's name for each of Lightning's; a class with two names in Lightning is found under both."""
    names = {theirs: ours for ours, theirs in lightnings_names().items()}
    names.update({place: names[theirs] for place, theirs in _table()["defined_at"].items()})
    for package, other in (("lightning.pytorch.", "pytorch_lightning."), ("lightning.fabric.", "lightning_fabric.")):
        names.update(
            {name.replace(package, other, 1): ours for name, ours in names.items() if name.startswith(package)}
        )
    return names


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _is_fabricamps(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "fabricamp"


def refuse_unnamed(value: object) -> None:
    """Raises :class:`CheckpointError` if ``value``, about to be pickled, is fabricamp's and Lightning has no equal of it."""
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        if _is_fabricamps(value) and _name_of(value) not in lightnings_names():
            raise CheckpointError(
                f"{_name_of(value)} is a name of fabricamp alone, and this file is for programs written for Lightning: leave it "
                "out (save_hyperparameters(ignore=[...])), or give a class or function of your own"
            )
        return
    kind = type(value)
    if _is_fabricamps(kind) and _name_of(kind) not in same_state():
        raise CheckpointError(
            f"an object of {_name_of(kind)} has another state than Lightning's of that name, or Lightning has none, and this file "
            "is for programs written for Lightning: leave it out (save_hyperparameters(ignore=[...])), or save what it is made of"
        )


def renamed(data: bytes) -> bytes:
    """Returns ``data``, opcodes of :data:`PROTOCOL`, with fabricamp's names replaced by Lightning's."""
    if pickle.GLOBAL + b"fabricamp." not in data:  # to read all opcodes takes longer than to pickle them
        return data
    result = io.BytesIO()
    done = 0
    for opcode, argument, position in pickletools.genops(data + pickle.STOP):
        if opcode.name != "GLOBAL" or position is None:  # genops gives no position only for pickles read from a stream
            continue
        module, _, name = str(argument).partition(" ")  # genops puts a space between the two lines
        theirs = lightnings_names().get(f"{module}.{name}")
        if theirs is None:
            continue
        their_module, _, their_name = theirs.rpartition(".")
        result.write(data[done:position] + f"c{their_module}\n{their_name}\n".encode())
        done = position + len(f"c{module}\n{name}\n".encode())
    return result.getvalue() + data[done:]


def find_named(module: str, name: str) -> Any:
    """Returns fabricamp's class or function for a name of Lightning's; None for any other name."""
    ours = _our_names().get(f"{module}.{name}")
    if ours is None:
        return None
    our_module, _, our_name = ours.rpartition(".")
    return getattr(importlib.import_module(our_module), our_name)


@contextlib.contextmanager
def allowed_under_both_names() -> Iterator[None]:
    """A context in which ``torch.load(weights_only=True)`` knows types of ``add_safe_globals`` by Lightning's names too."""
    given: set[Any] = {*torch.serialization.get_safe_globals()}
    by_name = lightnings_names()
    more: set[Any] = {
        (one, by_name[_name_of(one)])
        for one in (entry[0] if isinstance(entry, tuple) else entry for entry in given)
        if _is_fabricamps(one) and _name_of(one) in by_name
    }
    # Only new types: safe_globals removes all types that it was given at its end, also those that were allowed before.
    added = [*(more - given)]
    # torch does not change its set atomically, so the set is left alone if there is nothing to add: another thread may use it.
    with torch.serialization.safe_globals(added) if added else contextlib.nullcontext():
        yield


class Unpickler(pickle.Unpickler):
    """Rebuilds any object, also one that is named as Lightning's, whether Lightning's names can be imported or not."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns fabricamp's class for a name of Lightning's."""
        found = find_named(module, name)
        return super().find_class(module, name) if found is None else found
