"""Lets whoever writes weights and optimizer states wait for copies that still read them, as a checkpoint's in the background do.

:data:`WRITES` is closed by such a copy, and opened by the first writer after it.  Writers of the package ask
:attr:`WriteGate.closed` and open it; what a program writes by torch's functions opens it too, while a :class:`Watch` is active.
Compiled code must not see a watch, which would have it compiled again: :func:`unwatched`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fabricamp.ops.shards import local
from fabricamp.torch_private import function_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Result = TypeVar("Result")


class WriteGate:
    """Closed while a copy reads tensors in place.

    Example:
        >>> gate = WriteGate()
        >>> gate.close(lambda: print("the copy is complete"), ())
        >>> if gate.closed:
        ...     gate.open()
        the copy is complete
    """

    __slots__ = ("_held", "_wait", "closed", "may_close")

    def __init__(self) -> None:
        self.closed = False
        """Whether a writer has to call :meth:`open` first."""
        self.may_close: Callable[[], Iterable[int]] | None = None
        """Returns the addresses of the storages that a copy may read in this run; None if no copy will."""
        self._wait: Callable[[], None] | None = None
        self._held: frozenset[int] = frozenset()

    def close(self, wait: Callable[[], None], held: Iterable[int]) -> None:
        """Closes it until ``wait`` was called, which lets the writer's stream, or the writer, wait for the copy.

        ``held``: the addresses of the storages that are read.
        """
        self.open()
        self._wait = wait
        self._held = frozenset(held)
        self.closed = True

    def open(self) -> None:
        """Waits for the copy, if there is one."""
        wait = self.hand_over()
        if wait is not None:
            wait()

    def hand_over(self) -> Callable[[], None] | None:
        """Opens it without waiting: the caller lets the writers wait by the function that this returns."""
        wait = self._wait
        self.closed = False
        self._wait = None
        self._held = frozenset()
        return wait

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether ``tensor`` is in memory that is read."""
        own: Tensor = local(tensor)
        return own.layout is torch.strided and own.untyped_storage().data_ptr() in self._held


WRITES: Final = WriteGate()
"""The gate of this process."""


class Watch(TorchFunctionMode):
    """Opens the gate before a torch function that writes into memory that is read; for a program's own code."""

    def begin(self) -> None:
        """Watches from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Ends the watch, if others have begun to watch since, too."""
        with function_modes() as modes:
            if self in modes:
                modes.remove(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``."""
        kwargs = kwargs or {}
        if (
            torch.compiler.is_compiling()
        ):  # a constant there; torch 2.13 compiles wrong code for what it cannot trace here
            return func(*args, **kwargs)
        if WRITES.closed and _writes(func, kwargs) and any(map(WRITES.holds, _tensors_in((args, kwargs)))):
            WRITES.open()
        return func(*args, **kwargs)


def unwatched(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns ``function``, compiled code, without a :class:`Watch` while it runs."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        with function_modes() as modes:
            before = list(modes)
            modes[:] = [mode for mode in modes if not isinstance(mode, Watch)]
        try:
            return function(*args, **kwargs)
        finally:
            with function_modes() as modes:
                modes[:] = before

    return call


def _writes(func: Any, kwargs: Any) -> bool:
    """Returns whether a function may write into an argument, by torch's rules for names."""
    name = getattr(func, "__name__", "")
    if name == "__set__":  # others, such as .grad, write nothing into the tensor's memory, and .data gives it another
        return getattr(getattr(func, "__self__", None), "__name__", "") in ("real", "imag")
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_") or "out" in kwargs


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))
