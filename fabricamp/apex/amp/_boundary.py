"""Dtype boundaries for scripts: always armed and in any thread, because a script has no begin and end of a step."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn

from fabricamp.precision.boundary import CALLS, Boundary


class _Outside(threading.local):
    """Per thread, about the bounded modules entered: autocast's cache setting before them, and the root of their model."""

    def __init__(self) -> None:
        self.caching = True
        self.root: object = None


_OUTSIDE = _Outside()


def forget_calls() -> None:
    """Clears the calls that an interrupt ended: torch runs hooks after an ``Exception`` only, not a ``KeyboardInterrupt``."""
    if CALLS.stack:
        CALLS.stack.clear()
        torch.set_autocast_cache_enabled(_OUTSIDE.caching)
        torch.clear_autocast_cache()


def _runs(module_id: int, *, besides: nn.Module) -> bool:
    """Returns whether a call of the module is running in this thread, not counting the call of ``besides`` that begins.

    It looks at the interpreter's frames.  An interrupt runs no code of fabricamp (``Module.register_forward_hook`` runs an
    ``always_call`` hook for an ``Exception`` only), and a script, unlike a step, has no end at which the state could be reset.
    """
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and id(frame.f_locals.get("self")) == module_id
        frame = frame.f_back
    return calls > (module_id == id(besides))


class OpenBoundary(Boundary):
    """A boundary that is always armed, for scripts: they call a module at any time and from any thread.

    So all modules have their hooks from the start.  The autocast cache flag marks a call from the script here too.  But here it is
    read in every call, and is on outside of modules and off inside, because a script does not set it.  ``root`` is one object for
    all modules of a model.
    """

    def __init__(self, dtype: torch.dtype | None, output_dtype: torch.dtype, root: object) -> None:
        super().__init__(dtype, output_dtype)
        self.root = root

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The pre-hook: casts the inputs of a call from the script."""
        stack = CALLS.stack
        if (
            stack
            and (stack[0] == id(module) or _OUTSIDE.root is not self.root)  # else within the running module
            and not torch.compiler.is_compiling()
            and not _runs(stack[0], besides=module)
        ):
            forget_calls()
        if stack:
            stack.append(id(module))
            return None
        if not torch.is_autocast_cache_enabled() or not self.is_of(module):
            return None
        _OUTSIDE.root = self.root
        _OUTSIDE.caching = True
        stack.append(id(module))
        torch.set_autocast_cache_enabled(False)
        return self.cast_inputs(args, kwargs)

    def go_outside(self) -> None:
        """Returns to the script after the outermost module."""
        torch.set_autocast_cache_enabled(True)


class CachingBoundary(Boundary):
    """Turns autocast's cache of half weights on during one call of a module, and off after it.

    For scripts, in which autocast is always on: a cache across calls would hold old weights after a step or a loaded state dict,
    and weights without gradient after an evaluation.  ``output_dtype`` None leaves outputs as they are.
    """

    def __init__(self, output_dtype: torch.dtype | None) -> None:
        super().__init__(None, output_dtype)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The pre-hook: turns the cache on."""
        stack = CALLS.stack
        if stack and not _runs(stack[0], besides=module):
            forget_calls()
        if not stack:
            _OUTSIDE.caching = torch.is_autocast_cache_enabled()
        stack.append(id(module))
        torch.set_autocast_cache_enabled(True)

    def go_outside(self) -> None:
        """Returns to the script after the outermost module."""
        torch.set_autocast_cache_enabled(_OUTSIDE.caching)
        torch.clear_autocast_cache()
