"""The boundary of a half module: what the user's step calls gets half inputs and gives back fp32.

Calls inside a forward are untouched.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabricamp.precision.casting import cast_floating

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from torch.utils.hooks import RemovableHandle

__all__ = ["Boundary", "CachingBoundary", "InsideStep", "OpenBoundary", "OutsideStep", "forget_calls"]


class _Calls(threading.local):
    """Whether this thread is in the user's step, which bounded modules it is inside of, and what autocast did outside of them."""

    def __init__(self) -> None:
        self.armed = False
        self.caching = True
        self.root: object = None
        self.stack: list[nn.Module] = []


_CALLS = _Calls()


def forget_calls() -> None:
    """Forgets calls that an interrupt ended: torch runs hooks behind an ``Exception``, and ``KeyboardInterrupt`` is none."""
    if _CALLS.stack:
        _CALLS.stack.clear()
        torch.set_autocast_cache_enabled(_CALLS.caching)
        torch.clear_autocast_cache()


def _runs(module: nn.Module, *, besides: nn.Module) -> bool:
    """Returns whether a call of ``module`` goes on in this thread, not counting the call of ``besides`` that begins."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > (module is besides)


class Boundary:
    """The two hooks of one module; plain data, so that copies and pickles of the module carry their own.

    Which call comes from the step is known from the stack of bounded modules.  Activation checkpointing runs a call again in
    backward, outside any step; whether it came from the step is then told by a flag that torch itself saves and restores
    around the second run, in both modes: ``is_autocast_cache_enabled``, off in a step outside any module, on everywhere else.
    """

    def __init__(self, dtype: torch.dtype | None, output_dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype
        self.was_called_from_step = False

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks ``module``; returns what removes the hooks."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the forward: casts what comes from the step."""
        calls = _CALLS
        if calls.stack:
            calls.stack.append(module)
            return None
        if not calls.armed and (torch.is_autocast_cache_enabled() or not self.was_called_from_step):
            return None
        if not self.is_of(module):
            return None
        self.was_called_from_step = True
        calls.stack.append(module)
        torch.set_autocast_cache_enabled(True)
        return self.cast_inputs(args, kwargs)

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Returns the arguments in the module's own dtype; None where that is none in particular."""
        return None if self.dtype is None else (cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype))

    def is_of(self, module: nn.Module) -> bool:
        """Whether ``module`` is still what the boundary was made for, not a copy that was converted to something else."""
        # A replica of DataParallel's has its weights as plain attributes.
        own = self.dtype is None or getattr(module, "_is_replica", False)
        return own or any(parameter.dtype == self.dtype for parameter in module.parameters())

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, or its exception: casts what goes to the step."""
        stack = _CALLS.stack
        if not any(entry is module for entry in stack):
            return None
        while stack.pop() is not module:
            pass
        if stack:
            return None
        torch.set_autocast_cache_enabled(False)
        return cast_floating(output, self.output_dtype)


class OpenBoundary(Boundary):
    """One that is always armed, for scripts: they call a module at any time and from any thread.

    The flag that tells calls apart is the other way round here, on outside of modules and off inside: a script sets nothing.
    ``root`` is one object for all modules of a model.
    """

    def __init__(self, dtype: torch.dtype | None, output_dtype: torch.dtype, root: object) -> None:
        super().__init__(dtype, output_dtype)
        self.root = root

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the forward: casts what comes from the script."""
        calls = _CALLS
        stack = calls.stack
        if (
            stack
            and (stack[0] is module or calls.root is not self.root)  # else it is a part of what runs
            and not torch.compiler.is_compiling()
            and not _runs(stack[0], besides=module)
        ):
            forget_calls()
        if stack:
            stack.append(module)
            return None
        if not torch.is_autocast_cache_enabled() or not self.is_of(module):
            return None
        calls.root, calls.caching = self.root, True
        stack.append(module)
        torch.set_autocast_cache_enabled(False)
        return self.cast_inputs(args, kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, or its exception: casts what goes to the script."""
        inside = bool(_CALLS.stack)
        result = super().leave(module, args, output)
        if inside and not _CALLS.stack:
            torch.set_autocast_cache_enabled(True)
        return result


class CachingBoundary:
    """Lets autocast keep the half weights that it made for the length of one call of a module, and no longer.

    For scripts, in which autocast is on all the time: what it kept across calls would be old weights after a step or a loaded
    state dict, and weights without gradient after an evaluation.  ``output_dtype`` None leaves outputs as they are.
    """

    def __init__(self, output_dtype: torch.dtype | None) -> None:
        self.output_dtype = output_dtype

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks ``module``; returns what removes the hooks."""
        return [
            module.register_forward_pre_hook(self.enter, prepend=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        if _CALLS.stack and not _runs(_CALLS.stack[0], besides=module):
            forget_calls()
        if not _CALLS.stack:
            _CALLS.caching = torch.is_autocast_cache_enabled()
        _CALLS.stack.append(module)
        torch.set_autocast_cache_enabled(True)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, or its exception."""
        stack = _CALLS.stack
        if not any(entry is module for entry in stack):
            return None
        while stack.pop() is not module:
            pass
        if stack:
            return None
        torch.set_autocast_cache_enabled(_CALLS.caching)
        torch.clear_autocast_cache()
        return None if self.output_dtype is None else cast_floating(output, self.output_dtype)


class InsideStep:
    """A context, to be entered anew for each step: boundaries are armed; left, all is as it was before."""

    def __init__(self, *, armed: bool = True) -> None:
        self._armed = armed
        self._saved: list[tuple[bool, list[nn.Module], bool]] = []

    def __enter__(self) -> None:
        self._saved.append((_CALLS.armed, _CALLS.stack, torch.is_autocast_cache_enabled()))
        _CALLS.armed, _CALLS.stack = self._armed, []
        torch.set_autocast_cache_enabled(not self._armed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _CALLS.armed, _CALLS.stack, cache = self._saved.pop()
        torch.set_autocast_cache_enabled(cache)


class OutsideStep(InsideStep):
    """A context in which boundaries rest: backward and updates that the step itself asks for."""

    def __init__(self) -> None:
        super().__init__(armed=False)
