"""Whether the code of a function names something, itself or in the functions that it names."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_LEFT_OUT = ("torch", "fabricamp")


def reaches(call: Callable[..., object], wanted: Collection[str], owners: Collection[object]) -> bool:
    """Returns whether the code of ``call`` has one of the ``wanted`` names, attributes or strings, or reaches code that has.

    Followed are the names of functions in its globals and closures, and of methods of ``owners``; not into torch and this package.
    A call without Python code may do anything.
    """
    first = _function_of(call)
    if first is None:
        return True
    waiting, seen = [first], set[CodeType]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen or str(function.__module__).partition(".")[0] in _LEFT_OUT:
            continue
        seen.add(function.__code__)
        names = set(_names_in(function.__code__))
        if not names.isdisjoint(wanted):
            return True
        waiting += _functions_named(function, names, owners)
    return False


def _functions_named(function: FunctionType, names: Collection[str], owners: Collection[object]) -> list[FunctionType]:
    found = [getattr(owner, name, None) for owner in map(type, owners) for name in names]
    found += [vars(owner).get(name) for owner in owners for name in names]
    found += [function.__globals__.get(name) for name in names]
    found += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [one for one in map(_function_of, found) if one is not None]


def _function_of(call: Any) -> FunctionType | None:
    """Returns the Python function behind a method, property or partial call; None if there is none."""
    if isinstance(call, property):
        call = call.fget
    while isinstance(call, functools.partial):
        call = call.func
    call = getattr(call, "__wrapped__", call)
    call = getattr(call, "__func__", call)
    return call if isinstance(call, FunctionType) else None


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the globals, attributes and strings of ``code``, and of functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if the variable has no value yet
    except ValueError:
        return False
    return True
