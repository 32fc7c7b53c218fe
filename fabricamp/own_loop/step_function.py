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
import sys
from argparse import Namespace
from collections import deque
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fabricamp.engine.graph.host_effects import CapturedConstantsGuard
from fabricamp.errors import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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
        self._held: list[object] = []
        """What the identities are of, so that no other object gets one of them."""
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
        before = self._before
        if now == before:
            return
        attributes = vars(self._module)
        for name in [*now, *(one for one in before if one not in now)]:
            if name not in before or name not in now or now[name] != before[name]:
                key = f"{name}, which step's function reads"
                attributes[key] = attributes.get(key, 0) + 1
        self._before = now
        self._held = states.held


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
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, None
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    variables = function.__globals__
    for name in _reads(code).variables:
        if name in variables:
            yield name, variables[name]
        elif not hasattr(builtins, name):
            yield name, None


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
        self.held: list[object] = []
        self._count = 0
        self._seen: set[int] = set()  # objects that refer to themselves
        self._attributes: frozenset[str] = frozenset()

    def code_of(self, function: Any) -> Any:
        """Returns the identity of a function's code."""
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            self._attributes |= _reads(code).attributes
        return self._identity(function if code is None else code)

    def of(self, value: Any, depth: int = 0) -> Any:
        """Returns the state of ``value``."""
        self._count += 1
        if self._count > _MOST or depth > _DEEPEST:
            raise _TooMuchError
        kind = type(value)
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, _PLAIN):
            return kind.__name__, (value if value == value else "nan")  # noqa: PLR0124 - nan alone differs from itself
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, np.ndarray | np.generic):
            return value.dtype.str, value.shape, value.tobytes()
        if id(value) in self._seen:
            return id(value)
        self._seen.add(id(value))
        try:
            return self._of_object(value, depth + 1)
        finally:
            self._seen.discard(id(value))

    def _identity(self, value: object) -> int:
        self.held.append(value)
        return id(value)

    def _of_tensor(self, tensor: Tensor) -> Any:
        # A tensor of the host may be a number of a launch, so it counts by what was written to it.
        counts = tensor.device.type != self._device and not tensor.is_inference()
        version = tensor._version if counts else 0
        return self._identity(tensor), tensor.requires_grad, version

    def _of_module(self, module: nn.Module) -> Any:
        number = self._identity(module)
        if number in self._own:
            return number
        guard, changes = self._guards.get(number, (None, 0))
        if guard is None or not guard.are_unchanged():
            changes += 1
            self._guards[number] = CapturedConstantsGuard(module, {}), changes
        return number, changes

    def _of_object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, FunctionType | MethodType | functools.partial):
            if _is_of_library(value):
                return self._identity(value)
            code = self.code_of(value)
            return code, [(name, self.of(one, depth)) for name, one in read_by(value)]
        if isinstance(value, list | tuple | deque):
            return kind, [self.of(one, depth) for one in value]
        if isinstance(value, dict):
            return kind, [(self.of(key, depth), self.of(one, depth)) for key, one in value.items()]
        if isinstance(value, set | frozenset):
            return kind, {self._identity(one) if not isinstance(one, _PLAIN) else one for one in value}
        if isinstance(value, ModuleType):
            # Only what the code names: a module holds everything.
            named = {name: one for name, one in vars(value).items() if name in self._attributes}
            return self._identity(value), self._plain_of(named)
        if isinstance(value, BuiltinFunctionType):
            return self._identity(value)
        if isinstance(value, type):
            attributes = {} if _is_of_library(value) else vars(value)
            return self._identity(value), self._plain_of(attributes)
        if hasattr(value, "global_step") and kind.__module__.startswith("fabricamp."):  # a Loop
            return self._identity(value), [getattr(value, one) for one in _COUNTERS if one in self._attributes]
        if (_is_of_library(kind) and not isinstance(value, _NAMESPACES)) or isinstance(value, Enum):
            return self._identity(value)
        attributes = dict(getattr(value, "__dict__", {}))
        attributes |= {name: getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)}
        return self._identity(value), [(name, self.of(one, depth)) for name, one in attributes.items()], self.of(kind)

    def _plain_of(self, attributes: Mapping[str, Any]) -> list[tuple[str, Any]]:
        plain = [
            (name, one) for name, one in attributes.items() if isinstance(one, _PLAIN) and not name.startswith("__")
        ]
        return [(name, self.of(one)) for name, one in plain]


def _is_of_library(value: Any) -> bool:
    home = getattr(value, "__module__", None) or ""
    return home.partition(".")[0] in _LIBRARIES
