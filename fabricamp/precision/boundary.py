"""The boundary of a half module: what the user's step calls gets half inputs and gives back fp32.

Calls inside a forward are untouched.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from fabricamp.precision.casting import cast_floating

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["Boundary", "InsideStep", "OutsideStep"]


class _Calls(threading.local):
    """Whether this thread is in the user's step, and which bounded modules it is inside of."""

    def __init__(self) -> None:
        self.armed = False
        self.stack: list[nn.Module] = []


_CALLS = _Calls()


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
        if self.dtype is not None and not any(parameter.dtype == self.dtype for parameter in module.parameters()):
            return None  # a copy that was converted to something else
        self.was_called_from_step = True
        calls.stack.append(module)
        torch.set_autocast_cache_enabled(True)
        return None if self.dtype is None else (cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype))

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
