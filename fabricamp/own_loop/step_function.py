"""What a captured step depends on in the function of ``Loop.step``: its code, and the values that it reads by name.

A graph repeats the launches of its capture, so a number that the function has read is a constant of it.  :class:`StepFunction`
looks at these values before each step: closure cells, defaults, globals, and what functions, containers and objects of these hold.
Tensors and modules count by identity, as a replay reads their memory, numbers and their like by value.  What has changed is noted
in an attribute of the run's module.  The graph compares these before each replay, as it does with the attributes of any module: a
change is a new capture, and one in each step is refused by the value's name.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import sys
from argparse import Namespace
from collections import ChainMap, deque
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fabricamp.engine.graph.host_effects import CapturedConstantsGuard
from fabricamp.errors import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fabricamp.own_loop.module import LoopModule

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LIBRARIES: Final = frozenset({"torch", "numpy", "fabricamp", *sys.stdlib_module_names}) - {"__main__"}
_MOST: Final = 2000
"""How many values a function may read: each step looks at them."""
_DEEPEST: Final = 8
_NAMESPACES: Final = (SimpleNamespace, Namespace)
_COUNTERS: Final = ("global_step", "epoch")
"""What of a Loop changes from step to step."""


class _Reads(NamedTuple):
    """What a code object names."""

    variables: tuple[str, ...]
    """Global variables."""
    attributes: frozenset[str]


class _TooMuchError(Exception):
    """There are more values than a look in each step has time for."""


class StepFunction:
    """Notes in attributes of ``module`` which values the function of a step reads, and which of them have changed."""

    def __init__(self, module: LoopModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._own = {id(part) for part in module.modules()}  # the graph looks at these itself
        self._before: dict[str, Any] = {}
        self.seen = _Seen()
        """What the last function read; as long as the next reads the same, there is nothing to note."""
        self._guards: dict[int, tuple[CapturedConstantsGuard, int]] = {}
        """Of modules that are not trained: a guard of their attributes and weights, and how often these have changed."""

    def look(self, function: Callable[..., Any]) -> None:
        """Notes what has changed since the last step; raises :class:`NotCapturableError` for a function that reads too much."""
        states = _Look(self._own, self._guards, self._device)
        now = {"the code": states.code_of(function)}
        for name, value in read_by(function):
            try:
                now[name] = states.of(value)
            except _TooMuchError:
                raise NotCapturableError(
                    f"step's function reads {name!r}, and with it more than {_MOST} values, or ones {_DEEPEST} objects deep, each "
                    "of which would be looked at in each step; let it read what it needs by names of their own"
                ) from None
        self.seen = states.seen  # also what the identities are of, so that no other object gets one of them
        before = self._before
        if now == before:
            return
        attributes = vars(self._module)
        for name in [*now, *(one for one in before if one not in now)]:
            if name not in before or name not in now or now[name] != before[name]:
                key = f"{name}, which step's function reads"
                attributes[key] = attributes.get(key, 0) + 1
        self._before = now


class _Seen:
    """What a look has seen, as lists that the next step compares by C functions: nearly always nothing has changed.

    ``add`` notes an object with the values in it, of which each is the same object then, or the next step looks anew;
    ``add_fact`` something that is equal then.
    """

    def __init__(self) -> None:
        self._kind: type | None = None
        self._parts: list[Callable[[Any], Sequence[object]]] = []
        self._owners: list[object] = []  # without the function, which may be a new one in each step
        self._lengths: list[int] = []
        self._values: list[object] = []
        self._getters: list[Callable[[Any], Any]] = []
        self._sources: list[object] = []
        self._facts: list[Any] = []

    def add(self, owner: object, parts: Callable[[Any], Sequence[object]]) -> None:
        """Notes what ``parts(owner)`` returns; the function of the step comes first."""
        if self._kind is None:
            self._kind = type(owner)
        else:
            self._owners.append(owner)
        values = parts(owner)
        self._parts.append(parts)
        self._lengths.append(len(values))
        self._values += values

    def add_fact(self, source: object, getter: Callable[[Any], Any]) -> Any:
        """Notes what ``getter(source)`` returns, and returns it."""
        fact = getter(source)
        self._sources.append(source)
        self._getters.append(getter)
        self._facts.append(fact)
        return fact

    def is_all_that_is_read_by(self, function: Any) -> bool:
        """Whether ``function`` reads the very objects that were noted, and these are as they were."""
        if type(function) is not self._kind:
            return False
        present = list(map(operator.call, self._parts, [function, *self._owners]))
        same = all(map(operator.is_, chain.from_iterable(present), self._values))
        same = same and list(map(len, present)) == self._lengths
        return same and list(map(operator.call, self._getters, self._sources)) == self._facts


def read_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values that a function reads by name: closure cells, defaults, globals; of a callable object, itself.

    >>> factor = 2.0
    >>> list(read_by(lambda x, power=3: x))
    [('power', 3)]
    """
    if isinstance(function, functools.partial):
        yield from read_by(function.func)
        yield from ((f"argument {number}", value) for number, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield from read_by(function.__func__)
    elif isinstance(function, FunctionType):
        yield from _of_function(function)
    else:
        yield "itself", function


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    yield from zip(code.co_freevars, _contents(function.__closure__ or ()), strict=True)
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    variables = function.__globals__
    for name in _reads(code).variables:
        if name in variables or not hasattr(builtins, name):
            yield name, variables.get(name)


def _contents(cells: Iterable[CellType]) -> list[Any]:
    """Returns what cells hold; None for one whose variable is not assigned yet."""
    try:
        return list(map(_content, cells))
    except ValueError:
        return [None if cell == CellType() else cell.cell_contents for cell in cells]


@functools.lru_cache(maxsize=1024)
def _reads(code: CodeType) -> _Reads:
    variables: dict[str, None] = {}
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables[name] = None
        elif isinstance(name, str) and ("ATTR" in instruction.opname or "METHOD" in instruction.opname):
            attributes.add(name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _reads(constant)
            variables.update(dict.fromkeys(inner.variables))
            attributes |= inner.attributes
    return _Reads(tuple(variables), frozenset(attributes))


class _Look:
    """One look at the values of a function; each :meth:`of` returns what is equal as long as a replay stays right."""

    def __init__(
        self, own: Iterable[int], guards: dict[int, tuple[CapturedConstantsGuard, int]], device: torch.device
    ) -> None:
        self._own = own
        self._device = device.type
        self._guards = guards
        self.seen = _Seen()
        self._count = 0
        self._within: set[int] = set()  # objects that refer to themselves
        self._attributes: frozenset[str] = frozenset()

    def code_of(self, function: Any) -> int:
        """Returns the identity of a function's code, and notes what it reads."""
        if isinstance(function, functools.partial):
            self.seen.add(function, _in_partial)
            return self.code_of(function.func)
        if isinstance(function, MethodType):
            self.seen.add(function, _in_method)
            return self.code_of(function.__func__)
        if isinstance(function, FunctionType):
            reads = _reads(function.__code__)
            self._attributes |= reads.attributes
            self.seen.add(function, functools.partial(_in_function, reads.variables))
            return id(function.__code__)
        self.seen.add(function, _itself)
        return id(function)

    def of(self, value: Any, depth: int = 0) -> Any:
        """Returns the state of ``value``, which is held by what was noted last."""
        self._count += 1
        if self._count > _MOST or depth > _DEEPEST:
            raise _TooMuchError
        kind = type(value)
        if isinstance(value, Tensor):
            # A tensor of the host may be a number of a launch, so it counts by what was written to it.
            counts = value.device.type != self._device and not value.is_inference()
            version = self.seen.add_fact(value, _version) if counts else 0
            return id(value), self.seen.add_fact(value, _requires_grad), version
        if isinstance(value, _PLAIN):
            return kind.__name__, (value if value == value else "nan")  # noqa: PLR0124 - nan alone differs from itself
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, np.ndarray | np.generic):
            return self.seen.add_fact(value, _of_array)
        if id(value) in self._within:
            return id(value)
        self._within.add(id(value))
        try:
            return self._of_object(value, depth + 1)
        finally:
            self._within.discard(id(value))

    def _of_module(self, module: nn.Module) -> Any:
        number = id(module)
        if number in self._own:
            return number
        guard, changes = self._guards.get(number, (None, 0))
        if guard is None or not guard.are_unchanged():
            changes += 1
            guard = CapturedConstantsGuard(module, {})
            self._guards[number] = guard, changes
        self.seen.add_fact(guard, CapturedConstantsGuard.are_unchanged)
        return number, changes

    def _of_object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, functools.partial):
            self.seen.add(value, _in_partial)
            return self.of(value.func, depth), self.of(value.args, depth), self.of(value.keywords, depth)
        if isinstance(value, MethodType):
            self.seen.add(value, _in_method)
            return self.of(value.__self__, depth), self.of(value.__func__, depth)
        if isinstance(value, FunctionType):
            if _is_of_library(value):
                return id(value)
            code = self.code_of(value)
            return code, [(name, self.of(one, depth)) for name, one in read_by(value)]
        if isinstance(value, list | tuple | deque):
            self.seen.add(value, list)
            return kind, [self.of(one, depth) for one in value]
        if isinstance(value, dict):
            self.seen.add(value, _in_table)
            return kind, [(self.of(key, depth), self.of(one, depth)) for key, one in value.items()]
        if isinstance(value, set | frozenset):
            self.seen.add(value, list)
            return kind, {id(one) if not isinstance(one, _PLAIN) else one for one in value}
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__  # of a method such as dict.get
            return id(value), None if owner is None or isinstance(owner, ModuleType) else self.of(owner, depth)
        if isinstance(value, ModuleType | type):
            return self._of_namespace(value, depth)
        if hasattr(value, "global_step") and kind.__module__.startswith("fabricamp."):  # a Loop
            return id(value), [
                self.seen.add_fact(value, operator.attrgetter(one)) for one in _COUNTERS if one in self._attributes
            ]
        if (_is_of_library(kind) and not isinstance(value, _NAMESPACES)) or isinstance(value, Enum):
            return id(value)
        self.seen.add(value, _in_object)
        attributes = _attributes_of(value)
        return id(value), [(name, self.of(one, depth)) for name, one in attributes.items()], self.of(kind, depth)

    def _of_namespace(self, owner: ModuleType | type, depth: int) -> Any:
        """Returns the state of what the code may name of a module, or of a class with its bases: these hold everything."""
        table: Mapping[str, Any] = vars(owner)
        names = set(table) & self._attributes
        if isinstance(owner, type):
            classes = [one for one in owner.__mro__ if not _is_of_library(one)]
            for one in classes:
                self.seen.add(one, _in_class)
            table = ChainMap(*map(dict, map(vars, classes)))
            names = {name for name in table if not name.startswith("__")}
        else:
            self.seen.add(owner, functools.partial(_in_module, sorted(names)))
        found = {name: self.of(table[name]) for name in names if isinstance(table[name], _PLAIN)}
        # Functions and objects beside the program's own code; those of installed packages lead to everything there is.
        while _is_of_program(owner) and (rest := sorted((self._attributes & set(table)) - set(found))):
            for name in rest:
                found[name] = self.of(_unbound(table[name]), depth)
        return id(owner), found


def _in_function(variables: Sequence[str], function: FunctionType) -> list[object]:
    found = [function.__code__, *_contents(function.__closure__ or ()), *map(function.__globals__.get, variables)]
    if function.__defaults__ is not None or function.__kwdefaults__ is not None:
        found += [*(function.__defaults__ or ()), *_in_table(function.__kwdefaults__ or {})]
    return found


def _in_partial(function: functools.partial[Any]) -> list[object]:
    return [function.func, *function.args, *function.keywords, *function.keywords.values()]


def _in_method(method: MethodType) -> tuple[object, object]:
    return method.__self__, method.__func__


def _in_table(table: Mapping[Any, object]) -> list[object]:
    return [*table, *table.values()]


def _in_object(value: object) -> list[object]:
    return _in_table(_attributes_of(value))


def _in_class(kind: type) -> list[object]:
    return _in_table(vars(kind))


def _in_module(names: Sequence[str], module: ModuleType) -> list[object]:
    return list(map(vars(module).get, names))


def _itself(value: object) -> tuple[object]:
    return (value,)


def _unbound(value: Any) -> Any:
    """Returns the function of a method, as the class has it."""
    value = value.fget if isinstance(value, property) else value
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _attributes_of(value: object) -> dict[str, object]:
    slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def _of_array(array: np.ndarray[Any, Any] | np.generic) -> tuple[object, ...]:
    return array.dtype.str, array.shape, array.tobytes()


_content: Final = operator.attrgetter("cell_contents")
_version: Final = operator.attrgetter("_version")
_requires_grad: Final = operator.attrgetter("requires_grad")


def _is_of_library(value: Any) -> bool:
    home = getattr(value, "__module__", None) or ""
    return home.partition(".")[0] in _LIBRARIES


def _is_of_program(owner: ModuleType | type) -> bool:
    """Returns whether a module or a class is neither of a library nor of another installed package."""
    home = owner if isinstance(owner, ModuleType) else sys.modules.get(owner.__module__)
    name = home.__name__ if home is not None else ""
    return name.partition(".")[0] not in _LIBRARIES and "-packages" not in (getattr(home, "__file__", None) or "")
