"""Calls of single modules through ``torch.compile``: what the step calls, or the repeated blocks of a network.

torch keeps the compiled form of a module's call in ``_compiled_call_impl``; copies, pickles and state dicts leave it out.  During a
run this attribute is a :class:`CompiledCall`.  It runs the module's hooks uncompiled (the casts of a half module are among them),
and compiles ``forward``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from fabricamp.engine.block_calls import REPEATING, BlockCall
from fabricamp.precision.boundary import hook_before_first_call, others_hook_all_modules
from fabricamp.torch_private import compiled_by_user, current_backward, observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp.engine.compilation_watch import CompilationWatch

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE: Final = 1 / 3
"""A repeated module with more than this fraction of the parameters is searched for smaller repeated modules."""


# -- which modules -----------------------------------------------------------------------------------------------------------------


def called_modules(root: nn.Module) -> list[nn.Module]:
    """Returns every module that a step may call and that has parameters; without what the user has compiled."""
    return [module for module in _without_compiled(root) if next(module.parameters(), None) is not None]


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules with submodules and with siblings of the same class; without what the user has compiled."""
    total = sum(parameter.numel() for parameter in root.parameters())
    return list(_repeated(root, total * _LARGE))


def _repeated(module: nn.Module, large: float) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    counts = Counter(map(type, children))
    for child in children:
        if compiled_by_user(child):
            continue
        inner = _repeated(child, large)
        composite = next(child.children(), None) is not None and not isinstance(child, _CONTAINERS)
        if not composite or counts[type(child)] < 2:
            yield from inner
            continue
        # The stages of a network are siblings of one class too, but differ; the blocks within them are alike.
        smaller = list(inner) if sum(parameter.numel() for parameter in child.parameters()) > large else []
        yield from smaller or [child]


def _without_compiled(module: nn.Module) -> Iterator[nn.Module]:
    if compiled_by_user(module):
        return
    yield module
    for child in module.children():
        yield from _without_compiled(child)


# -- their calls -------------------------------------------------------------------------------------------------------------------


class CompiledCalls:
    """The compiled calls of a session's modules; ``compile`` is ``torch.compile`` with its keywords.

    A call runs compiled code if a step makes it, or a backward that recomputes a part of a step.  A call inside compiled code
    becomes a part of that code.
    """

    def __init__(self, compile: Callable[..., Any], watch: CompilationWatch) -> None:  # noqa: A002 - torch's name of it
        self.watch = watch
        self.armed = ""
        """The kind of step that runs ("training" or "evaluation"); empty between steps."""
        self.within = False
        """Whether a module runs compiled code."""
        self._compile = compile
        self._programs: dict[tuple[str, object], Callable[..., Any]] = {}
        self._modules: list[nn.Module] = []

    def put_on(self, modules: list[nn.Module], *, shared: bool) -> None:
        """Compiles the calls of ``modules`` from now on; ``shared``: modules of one class run the same code."""
        for module in modules:
            key: object = type(module) if shared else id(module)
            vars(module)["_compiled_call_impl"] = CompiledCall(self, module, key)
            self._modules.append(module)

    def take_off(self) -> None:
        """Leaves the modules as they were."""
        for module in self._modules:
            if isinstance(vars(module).get("_compiled_call_impl"), CompiledCall):
                del vars(module)["_compiled_call_impl"]
        self._modules.clear()
        self._programs.clear()

    def program(self, key: object, module: nn.Module) -> Callable[..., Any]:
        """Returns the compiled code for this kind of step; it takes a module and the arguments of its ``forward``."""
        # ``armed`` is not set in a backward that recomputes a part of a training step.
        kind = self.armed or "training"
        found = self._programs.get((kind, key))
        if found is None:
            found = self._compile(_forward_of(type(module).__name__))
            self._programs[kind, key] = found
        return found


def _forward_of(name: str) -> Callable[..., Any]:
    """Returns a function that runs ``forward`` of a module; torch's messages call it ``name``.

    torch stores compiled code with a function's code object, at most eight variants, so each program has its own code object.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)
    return call


class CompiledCall:
    """Replaces a module's call: torch runs this object instead."""

    def __init__(self, calls: CompiledCalls, module: nn.Module, key: object) -> None:
        self._calls = calls
        self._module = module
        self._key = key
        self._carrier: _Carrier | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the call, compiled if it is a step's own call."""
        module = self._module
        # The first condition is a constant while torch compiles a module that calls this one; it then compiles the plain call.
        if torch.compiler.is_compiling() or not self._runs_compiled():
            return module._call_impl(*args, **kwargs)
        calls = self._calls
        hook_before_first_call(module)
        program: Callable[..., Any] = partial(calls.program(self._key, module), module)
        if isinstance(call := vars(module).get("forward"), BlockCall):
            program = call.around(program)
        calls.within = True
        calls.watch.name = type(module).__name__
        try:
            with calls.watch:
                if _has_hooks(module):
                    return self._with_hooks(program, args, kwargs)
                return program(*args, **kwargs)
        finally:
            calls.within = False

    def _runs_compiled(self) -> bool:
        calls = self._calls
        if calls.within or REPEATING.on or not (calls.armed or current_backward() != -1) or observed():
            return False
        if others_hook_all_modules():
            calls.watch.say_hooked()
            return False
        return True

    def _with_hooks(self, program: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the module's hooks in torch's order around ``program``."""
        if self._carrier is None:
            self._carrier = _Carrier()
        carrier = self._carrier
        carrier.take_hooks(self._module)
        vars(carrier)["forward"] = program
        return nn.Module._call_impl(carrier, *args, **kwargs)


_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MARKS: Final = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_is_full_backward_hook",
)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


class _Carrier(nn.Module):
    """Has the hooks of another module and a ``forward`` of its own; torch calls it, and the hooks get the other module."""

    def take_hooks(self, module: nn.Module) -> None:
        """Takes the hooks that ``module`` has now."""
        own = vars(self)
        for name in _HOOKS:
            hooks = getattr(module, name)
            own[name] = OrderedDict((key, partial(_call_for, module, hook)) for key, hook in hooks.items())
        for name in _MARKS:
            own[name] = getattr(module, name)


def _call_for(module: nn.Module, hook: Callable[..., Any], _carrier: nn.Module, *args: Any) -> Any:
    return hook(module, *args)
