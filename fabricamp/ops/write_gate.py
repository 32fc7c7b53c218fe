"""Lets whoever writes weights and optimizer states wait for copies that still read them, as a checkpoint's in the background do.

:data:`WRITES` is closed by such a copy, and opened by the first writer after it.  Writers of the package ask
:attr:`WriteGate.closed` and open it; what a program writes by torch's functions opens it too, while a :class:`Watch` is active.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fabricamp.ops.shards import local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class WriteGate:
    """Closed while a copy reads tensors in place.

    Example:
        >>> gate = WriteGate()
        >>> gate.close(lambda: print("the copy is complete"), ())
        >>> if gate.closed:
        ...     gate.open()
        the copy is complete
    """

    __slots__ = ("_held", "_wait", "closed")

    def __init__(self) -> None:
        self.closed = False
        """Whether a writer has to call :meth:`open` first."""
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
        wait = self._wait
        self.closed = False
        self._wait = None
        self._held = frozenset()
        if wait is not None:
            wait()

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether ``tensor`` is in memory that is read."""
        own: Tensor = local(tensor)
        return own.layout is torch.strided and own.untyped_storage().data_ptr() in self._held


WRITES: Final = WriteGate()
"""The gate of this process."""


class Watch(TorchFunctionMode):
    """Opens the gate before a torch function that writes into memory that is read; for a program's own code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``."""
        kwargs = kwargs or {}
        if WRITES.closed and _writes(func, kwargs) and any(map(WRITES.holds, _tensors_in((args, kwargs)))):
            WRITES.open()
        return func(*args, **kwargs)


def _writes(func: Any, kwargs: Any) -> bool:
    """Returns whether a function may write into an argument, by torch's rules for names."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or name.startswith("__i")
    return name.endswith("_") or "out" in kwargs


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))
