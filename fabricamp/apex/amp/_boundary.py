"""Boundaries for scripts, which have no step that begins and ends: always armed, from any thread."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn

from fabricamp.precision.boundary import CALLS, Boundary


class _Outside(threading.local):
    """What this thread left outside of the bounded modules that it is in: what autocast did, and whose parts these are."""

    def __init__(self) -> None:
        self.caching = True
        self.root: object = None


_OUTSIDE = _Outside()


def forget_calls() -> None:
    """Forgets calls that an interrupt ended: torch runs hooks behind an ``Exception``, and ``KeyboardInterrupt`` is none."""
    if CALLS.stack:
        CALLS.stack.clear()
        torch.set_autocast_cache_enabled(_OUTSIDE.caching)
        torch.clear_autocast_cache()


def _runs(module_id: int, *, besides: nn.Module) -> bool:
    """Returns whether a call of the module goes on in this thread, not counting the call of ``besides`` that begins.

    Asks the interpreter's frames: nothing of fabricamp runs where an interrupt passes (``Module.register_forward_hook`` runs an
    ``always_call`` hook for an ``Exception``), and a script, unlike a step, has no end at which all could be put in order.
    """
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and id(frame.f_locals.get("self")) == module_id
        frame = frame.f_back
    return calls > (module_id == id(besides))


class OpenBoundary(Boundary):
    """One that is always armed, for scripts: they call a module at any time and from any thread.

    So all modules have their hooks from the start.  The flag that tells calls apart in backward is asked always here, and the
    other way round, on outside of modules and off inside: a script sets nothing.  ``root`` is one object for all modules of a
    model.
    """

    def __init__(self, dtype: torch.dtype | None, output_dtype: torch.dtype, root: object) -> None:
        super().__init__(dtype, output_dtype)
        self.root = root

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the forward: casts what comes from the script."""
        stack = CALLS.stack
        if (
            stack
            and (stack[0] == id(module) or _OUTSIDE.root is not self.root)  # else it is a part of what runs
            and not torch.compiler.is_compiling()
            and not _runs(stack[0], besides=module)
        ):
            forget_calls()
        if stack:
            stack.append(id(module))
            return None
        if not torch.is_autocast_cache_enabled() or not self.is_of(module):
            return None
        _OUTSIDE.root, _OUTSIDE.caching = self.root, True
        stack.append(id(module))
        torch.set_autocast_cache_enabled(False)
        return self.cast_inputs(args, kwargs)

    def go_outside(self) -> None:
        """The outermost module was left: the script goes on."""
        torch.set_autocast_cache_enabled(True)


class CachingBoundary(Boundary):
    """Lets autocast keep the half weights that it made for the length of one call of a module, and no longer.

    For scripts, in which autocast is on all the time: what it kept across calls would be old weights after a step or a loaded
    state dict, and weights without gradient after an evaluation.  ``output_dtype`` None leaves outputs as they are.
    """

    def __init__(self, output_dtype: torch.dtype | None) -> None:
        super().__init__(None, output_dtype)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward."""
        stack = CALLS.stack
        if stack and not _runs(stack[0], besides=module):
            forget_calls()
        if not stack:
            _OUTSIDE.caching = torch.is_autocast_cache_enabled()
        stack.append(id(module))
        torch.set_autocast_cache_enabled(True)

    def go_outside(self) -> None:
        """The outermost module was left: the script goes on."""
        torch.set_autocast_cache_enabled(_OUTSIDE.caching)
        torch.clear_autocast_cache()
