"""The boundary of a half module: what the user's step calls gets inputs in the module's dtype, and gives back fp32.

A module that is called from the step (``self(x)``, ``self.net(x)``, ``self.net.layer(x)``) has its floating arguments cast to its
own dtype, and its outputs to fp32.  What it calls inside its ``forward`` is left alone and costs nothing: there are no hooks on it.

While a step is outside of such modules, a pre-hook of *all* modules (``torch.nn.modules.module.register_module_forward_pre_hook``
in torch's words) watches what it calls.  A module that it calls for the first time, in whatever step, then gets two hooks of its
own, which see to the casts from there on.  The watch rests while a module with a boundary runs, in backward, and between steps.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fabricamp.ops.shards import is_shard
from fabricamp.precision.casting import cast_floating
from fabricamp.torch_private import current_backward, global_forward_pre_hooks


class _Calls(threading.local):
    """Whether this thread is in the user's step and watches it, and inside which modules with hooks of a boundary (their ids)."""

    def __init__(self) -> None:
        self.armed = self.watching = False
        self.stack: list[int] = []  # ids: torch.compile cannot trace a module that goes into a list twice


CALLS = _Calls()

# torch looks up in a table of the module whether a hook wants keyword arguments, and does so for hooks of all modules too, by
# their key (`_call_impl` in torch/nn/modules/module.py).  The public function would give it a number; this key is in the tables of
# bounded modules alone, with the boundary as its value: copies and pickles of a module have it.
_KEY: Any = "fabricamp.boundary"
_WATCHING: set[int] = set()  # ids of threads: the hook is the process's
_LOCK = threading.Lock()


def _watch(wanted: bool) -> None:
    """Registers the pre-hook of all modules for this thread, or removes it where no other thread wants it."""
    CALLS.watching = wanted
    with _LOCK:
        if wanted:
            _WATCHING.add(threading.get_ident())
            global_forward_pre_hooks[_KEY] = _before_any_module
            return
        _WATCHING.discard(threading.get_ident())
        if not _WATCHING:
            global_forward_pre_hooks.pop(_KEY, None)


def _before_any_module(module: nn.Module, args: Any, kwargs: Any = None) -> tuple[Any, Any] | None:
    """Hooks a module that a step calls for the first time; one without a boundary brings no ``kwargs``."""
    if kwargs is None or not CALLS.armed or CALLS.stack or current_backward() != -1:
        return None
    hooks: Any = module._forward_pre_hooks_with_kwargs
    boundary: Boundary = hooks[_KEY]
    if boundary.handles or not boundary.is_of(module):
        return None  # its own hooks run next
    boundary.hook(module)
    return boundary.enter(module, args, kwargs)  # torch runs the new pre-hook from the next call on


def _table(module: nn.Module) -> dict[Any, Any]:
    return cast("dict[Any, Any]", module._forward_pre_hooks_with_kwargs)


class Boundary:
    """What the step's calls of one module pass; plain data, so that copies and pickles of the module carry their own.

    Activation checkpointing runs a call again in backward, and it has to be cast as it was the first time.  torch then calls the
    same function with the same arguments, under the random state and the autocast state of the first run, in both of its modes
    (torch/utils/checkpoint.py: ``preserve_rng_state``, ``_get_autocast_kwargs``); nothing else is left of where that run was.
    So autocast's state tells it, by a part for which half modules have no use: ``is_autocast_cache_enabled`` is off in a step
    outside of bounded modules, and on everywhere else.  It is asked in backward alone.
    """

    def __init__(self, dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype
        self.handles: list[RemovableHandle] = []
        self._earlier_hooks: tuple[int, ...] = ()

    def put_on(self, module: nn.Module) -> None:
        """Gives ``module`` the boundary; its hooks follow when a step calls it."""
        self._earlier_hooks = tuple(module._forward_hooks)
        _table(module)[_KEY] = self

    def take_off(self, module: nn.Module) -> None:
        """Undoes :meth:`put_on`, and removes the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if _table(module).get(_KEY) is self:
            del _table(module)[_KEY]

    def hook(self, module: nn.Module) -> None:
        """Hooks ``module`` as of :meth:`put_on`: forward hooks from before it see half outputs, later ones what the step gets."""
        self.handles = self.attach(module)
        hooks = cast("OrderedDict[int, Any]", module._forward_hooks)
        own = self.handles[-1].id
        for key in [key for key in hooks if key != own and key not in self._earlier_hooks]:
            hooks.move_to_end(key)

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks ``module``; returns what removes the hooks."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the forward: casts what comes from the step."""
        stack = CALLS.stack
        if stack:
            stack.append(id(module))
            return None
        from_step = CALLS.armed if current_backward() == -1 else not torch.is_autocast_cache_enabled()
        if not from_step or not self.is_of(module):
            return None
        stack.append(id(module))
        _watch(False)
        torch.set_autocast_cache_enabled(True)
        return self.cast_inputs(args, kwargs)

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Returns the arguments in the module's own dtype; None where that is none in particular."""
        if self.dtype is None:
            return None
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype) if kwargs else kwargs

    def is_of(self, module: nn.Module) -> bool:
        """Whether ``module`` is still what the boundary was made for, not a copy that was converted to something else."""
        # A replica of DataParallel's has its weights as plain attributes.
        if self.dtype is None or getattr(module, "_is_replica", False):
            return True
        for parameter in module.parameters():  # noqa: SIM110 - as a rule the first one tells, and `any` makes two calls more
            if parameter.dtype == self.dtype or is_shard(parameter):
                return True
        return False

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, or its exception: casts what goes to the step."""
        stack, own = CALLS.stack, id(module)
        if own not in stack:
            return None  # it was not entered: boundaries were at rest, or another hook raised first
        while stack.pop() != own:
            pass
        if stack:
            return None
        self.go_outside()
        return None if self.output_dtype is None else cast_floating(output, self.output_dtype)

    def go_outside(self) -> None:
        """The outermost module was left: the step goes on."""
        torch.set_autocast_cache_enabled(False)
        _watch(CALLS.armed)


class InsideStep:
    """A context, to be entered anew for each step: boundaries are armed; left, all is as it was before."""

    def __init__(self, *, armed: bool = True) -> None:
        self._armed = armed
        self._saved: list[tuple[bool, list[int], bool]] = []
        # torch.compile's wrapper of a module warns of any such hook: it would see both the wrapper and the module, which are
        # two modules to us as well.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks", UserWarning)

    def __enter__(self) -> None:
        self._saved.append((CALLS.armed, CALLS.stack, torch.is_autocast_cache_enabled()))
        CALLS.armed, CALLS.stack = self._armed, []
        torch.set_autocast_cache_enabled(not self._armed)
        if CALLS.watching != self._armed:
            _watch(self._armed)

    def __exit__(self, *_: object) -> None:
        CALLS.armed, CALLS.stack, cache = self._saved.pop()
        torch.set_autocast_cache_enabled(cache)
        outside = CALLS.armed and not CALLS.stack
        if CALLS.watching != outside:
            _watch(outside)


class OutsideStep(InsideStep):
    """A context in which boundaries rest: backward and updates that the step itself asks for."""

    def __init__(self) -> None:
        super().__init__(armed=False)
