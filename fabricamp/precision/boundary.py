"""The dtype boundary of a half module: calls from the user's step get inputs in the module's dtype and return fp32.

A module called from the step (``self(x)``, ``self.net(x)``, ``self.net.layer(x)``) gets its floating arguments in its own dtype,
and its outputs are cast to fp32.  Modules called inside a ``forward`` have no hooks and no cost.

A global pre-hook (``torch.nn.modules.module.register_module_forward_pre_hook``) runs while a step is outside of such modules.  It
registers two hooks on each module that a step calls for the first time; these hooks make the casts from then on.  The global hook
is removed while a module with a boundary runs, in backward, and between steps.
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
from fabricamp.torch_private import current_backward, global_forward_pre_hooks, global_hooks


class _Calls(threading.local):
    """Per thread: in the user's step (``armed``), global hook wanted (``watching``), entered modules with hooks (``stack``)."""

    def __init__(self) -> None:
        self.armed = False
        self.watching = False
        self.stack: list[int] = []  # ids: torch.compile cannot trace a module that goes into a list twice


CALLS = _Calls()

# torch looks up a hook's key in a table of the module to see if the hook takes keyword arguments; it does so for global hooks too
# (`_call_impl` in torch/nn/modules/module.py).  The public function would use a number as key.  This key is only in the tables of
# bounded modules, with the boundary as its value, so copies and pickles of a module keep their boundary.
_KEY: Any = "fabricamp.boundary"
_WATCHING: set[int] = set()  # ids of threads: they share the process's one global hook
_LOCK = threading.Lock()


def _watch(wanted: bool) -> None:
    """Registers the global pre-hook for this thread, or removes it if no other thread wants it."""
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
    """Registers the boundary's hooks on a module that a step calls for the first time; without a boundary ``kwargs`` is None."""
    if kwargs is None or not CALLS.armed or CALLS.stack or current_backward() != -1:
        return None
    hooks: Any = module._forward_pre_hooks_with_kwargs
    boundary: Boundary = hooks[_KEY]
    if boundary.handles or not boundary.is_of(module):
        return None  # its own hooks run next
    boundary.hook(module)
    return boundary.enter(module, args, kwargs)  # torch runs the new pre-hook only from the next call on


def hook_before_first_call(module: nn.Module) -> None:
    """Registers the boundary's hooks on a module that a step is about to call, where torch would not look for the global hook."""
    boundary = _table(module).get(_KEY)
    if boundary is None or boundary.handles or not CALLS.armed or CALLS.stack or not boundary.is_of(module):
        return
    boundary.hook(module)


def others_hook_all_modules() -> bool:
    """Returns whether there are hooks for all modules beside the boundary's."""
    return global_hooks() > (_KEY in global_forward_pre_hooks)


def _table(module: nn.Module) -> dict[Any, Any]:
    return cast("dict[Any, Any]", module._forward_pre_hooks_with_kwargs)


class Boundary:
    """Casts inputs and outputs of the step's calls of one module; plain data, so copies and pickles of the module have their own.

    Activation checkpointing repeats a call in backward, and the repeated call needs the same casts.  In both of its modes torch
    restores only the RNG state and the autocast state of the first call (torch/utils/checkpoint.py: ``preserve_rng_state``,
    ``_get_autocast_kwargs``), with the same function and arguments.  So an autocast setting without use for half modules marks
    the place of a call: ``is_autocast_cache_enabled`` is off in a step outside of bounded modules, and on everywhere else.  It is
    read only in backward.
    """

    def __init__(self, dtype: torch.dtype | None, output_dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype
        self.handles: list[RemovableHandle] = []
        self._earlier_hooks: tuple[int, ...] = ()

    def put_on(self, module: nn.Module) -> None:
        """Attaches the boundary to ``module``; the hooks are registered when a step first calls the module."""
        self._earlier_hooks = tuple(module._forward_hooks)
        _table(module)[_KEY] = self

    def take_off(self, module: nn.Module) -> None:
        """Removes the boundary and its hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if _table(module).get(_KEY) is self:
            del _table(module)[_KEY]

    def hook(self, module: nn.Module) -> None:
        """Registers the hooks in the order of :meth:`put_on`: earlier forward hooks see half outputs, later ones see fp32."""
        self.handles = self.attach(module)
        hooks = cast("OrderedDict[int, Any]", module._forward_hooks)
        own = self.handles[-1].id
        for key in [key for key in hooks if key != own and key not in self._earlier_hooks]:
            hooks.move_to_end(key)

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Registers the hooks on ``module``; returns their handles."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The pre-hook: casts the inputs of a call from the step."""
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
        """Returns the arguments in the module's dtype; None if the boundary has no input dtype."""
        if self.dtype is None:
            return None
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype) if kwargs else kwargs

    def is_of(self, module: nn.Module) -> bool:
        """Returns whether ``module`` still has the boundary's dtype; a copy may have been converted to another one."""
        # A DataParallel replica has its weights as plain attributes.
        if self.dtype is None or getattr(module, "_is_replica", False):
            return True
        for parameter in module.parameters():  # noqa: SIM110 - usually the first one decides, and `any` makes two calls more
            if parameter.dtype == self.dtype or is_shard(parameter):
                return True
        return False

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook, called after an exception too: casts the outputs of a call from the step."""
        stack = CALLS.stack
        own = id(module)
        if own not in stack:
            return None  # not entered: boundaries were not armed, or another hook raised first
        while stack.pop() != own:
            pass
        if stack:
            return None
        self.go_outside()
        return None if self.output_dtype is None else cast_floating(output, self.output_dtype)

    def go_outside(self) -> None:
        """Returns to the user's step after the outermost module."""
        torch.set_autocast_cache_enabled(False)
        _watch(CALLS.armed)


def is_outside_step(device_type: str) -> bool:
    """Returns whether neither autocast nor a step's boundaries are on in this thread: :class:`OutsideStep` would do nothing."""
    return (
        not CALLS.armed
        and not CALLS.stack
        and torch.is_autocast_cache_enabled()
        and not torch.is_autocast_enabled(device_type)
    )


_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def reduced_without_boundary(module: nn.Module) -> tuple[Any, ...] | None:
    """Returns what pickles ``module`` without its boundary, for a file that other precisions load; None if it has none."""
    boundary = _table(module).get(_KEY)
    if boundary is None:
        return None
    reduced = cast("tuple[Any, ...]", module.__reduce_ex__(2))
    build, args, state, *others = reduced
    own = {_KEY, *(handle.id for handle in boundary.handles)}
    if isinstance(state, dict):
        without = {name: _without(state[name], own) for name in _HOOK_TABLES if name in state}
        state = {**state, **without}
    return build, args, state, *others


def _without(hooks: OrderedDict[Any, Any], keys: set[Any]) -> OrderedDict[Any, Any]:
    return OrderedDict((key, hook) for key, hook in hooks.items() if key not in keys)


class InsideStep:
    """A reusable context, entered in each step: arms the boundaries, and restores the previous state at exit."""

    def __init__(self, *, armed: bool = True) -> None:
        self._armed = armed
        self._saved: list[tuple[bool, list[int], bool]] = []
        # torch.compile's module wrapper warns about any global hook, because the hook sees both the wrapper and the module.  The
        # boundary treats them as two modules, so the warning does not apply.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks", UserWarning)

    def __enter__(self) -> None:
        self._saved.append((CALLS.armed, CALLS.stack, torch.is_autocast_cache_enabled()))
        CALLS.armed = self._armed
        CALLS.stack = []
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
    """A context without armed boundaries, for backward and updates called inside the step."""

    def __init__(self) -> None:
        super().__init__(armed=False)
