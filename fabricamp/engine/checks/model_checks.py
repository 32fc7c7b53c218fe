"""Checks the source of module and callbacks before the first batch: a forgotten ``return``, a misspelt hook."""

from __future__ import annotations

import dis
import inspect
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise, product
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabricamp.arguments.migration import hinted_hooks
from fabricamp.callbacks.base import Callback
from fabricamp.data import DataModule
from fabricamp.errors import ConfigError
from fabricamp.habits import habits
from fabricamp.hooks import overrides
from fabricamp.lightning.bases import lightnings_base
from fabricamp.module import TrainingModule
from fabricamp.state import TrainerFn

_LOG = logging.getLogger("fabricamp")
_NEAR = 0.85
"""How alike a method's name and a hook's have to be, for ``difflib``."""
_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}

_OTHER_WORDS = (
    ("validation", "val", "valid", "validate", "eval"),
    ("training", "train"),
    ("test", "testing"),
    ("predict", "prediction", "predicting"),
    ("optimizers", "optimizer", "optim"),
    ("dataloader", "dataloaders", "loader"),
    ("start", "begin", "started"),
    ("end", "finish", "finished", "stop", "ended"),
)
"""Groups of words that users write for each other in names of hooks."""


def check_steps(fn: TrainerFn, module: TrainingModule) -> None:
    """Raises :class:`ConfigError` if ``module`` lacks a method that the entry point calls."""
    name = type(module).__name__
    step = _STEPS[fn]
    by_forward = fn is TrainerFn.PREDICTING and overrides(module, "forward", Module)
    if not (by_forward or overrides(module, step, TrainingModule)):
        instead = ", or forward" if fn is TrainerFn.PREDICTING else ""
        cure = _renaming(module, step) or f"write one{instead}"
        raise ConfigError(f"{name} has no {step}, which {fn.value} needs; {cure}")
    if fn is not TrainerFn.FITTING:
        return
    if torch.is_inference_mode_enabled() or (module.automatic_optimization and not torch.is_grad_enabled()):
        raise ConfigError(
            "fit was called within torch.inference_mode() or torch.no_grad(), where nothing trains; call it outside"
        )
    if not overrides(module, "configure_optimizers", TrainingModule):
        cure = _renaming(module, "configure_optimizers") or "return an optimizer from it, or None"
        raise ConfigError(f"{name} has no configure_optimizers, which fit needs; {cure}")
    _check_training_step(module)


def _renaming(module: TrainingModule, missing: str) -> str:
    """Returns the advice to rename the method that was probably meant to be ``missing``; an empty string if there is none."""
    misspelt = misspelt_hooks(module, lightnings_base(type(module)) or TrainingModule)
    return next((f"rename {method} to {missing}" for method, hook in misspelt if hook == missing), "")


def _check_training_step(module: TrainingModule) -> None:
    """Raises :class:`ConfigError` for a ``training_step`` that takes an iterator, or that never returns a value."""
    step = module.training_step
    name = f"{type(module).__name__}.training_step"
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise ConfigError(
            f"{name} takes dataloader_iter, but it gets batches; write training_step(self, batch, batch_idx), and iterate over a "
            "loader of your own where one step needs several batches"
        )
    # A program written for Lightning runs, as it does there; the loop warns at the epoch's end that nothing was trained.
    if module.automatic_optimization and returns_nothing(step) and not habits().steps_may_train_nothing:
        raise ConfigError(
            f"{name} returns no value, so nothing would be trained; end it with 'return loss', or step the optimizers in it with "
            "automatic_optimization = False"
        )


def returns_nothing(call: object) -> bool:
    """Whether ``call`` is written in Python and returns None at every ``return``, explicit or implicit."""
    function = getattr(call, "__func__", call)
    if not isinstance(function, FunctionType) or inspect.isgeneratorfunction(function):
        return False
    instructions = [instruction for instruction in dis.get_instructions(function) if instruction.opname != "NOP"]
    # The instruction that puts the returned value on the stack: RETURN_CONST itself, or the one before RETURN_VALUE.  At a jump
    # target, such as the end of `return loss if ready else None`, either value may be returned, and RETURN_VALUE stands for that.
    loads = [
        before if instruction.opname == "RETURN_VALUE" and not instruction.is_jump_target else instruction
        for before, instruction in pairwise(instructions)
        if instruction.opname in ("RETURN_VALUE", "RETURN_CONST")
    ]
    return bool(loads) and all(load.opname.endswith("_CONST") and load.argval is None for load in loads)


def refuse_layers_without_weights(module: Module) -> None:
    """Raises :class:`ConfigError` for a lazy layer: a fit builds on weights that such a layer makes in its first forward."""
    for name, layer in module.named_modules():
        if any(is_lazy(one) for one in layer.parameters(recurse=False)):
            raise ConfigError(
                f"{name!r} ({type(layer).__name__}) has no weights before its first forward, and optimizer, levels and strategies "
                "build on them; run one batch through it under torch.no_grad(), at the end of the module's __init__ or in "
                "configure_model"
            )


def warn_of_oversights(
    module: TrainingModule,
    optimizers: Sequence[Optimizer],
    datamodule: DataModule | None,
    callbacks: Sequence[Callback],
) -> None:
    """Warns if nothing will be trained, of methods with nearly the name of a hook, and of ``on_...`` that nothing calls."""
    if module.automatic_optimization and not optimizers:
        _LOG.warning(
            "%s.configure_optimizers returned no optimizer: no weight will change; end it with 'return optimizer' where "
            "one is meant",
            type(module).__name__,
        )
    owners: list[tuple[Any, type]] = [(module, TrainingModule), *((one, Callback) for one in callbacks)]
    if datamodule is not None:
        owners.append((datamodule, DataModule))
    used = {name for owner, base in owners for name in _names_used(_own_classes(owner, base))}
    for owner, base in owners:
        for method, hook in misspelt_hooks(owner, lightnings_base(type(owner)) or base):
            _LOG.warning("%s.%s is not a hook; did you mean %r?", type(owner).__name__, method, hook)
        for method in unknown_hooks(owner, lightnings_base(type(owner)) or base, used):
            _LOG.warning(
                '%s.%s is not a hook, and nothing here calls it (help("fabricamp.hooks") lists the hooks)',
                type(owner).__name__,
                method,
            )


def misspelt_hooks(owner: object, base: type) -> Iterator[tuple[str, str]]:
    """Yields (method, hook) for each method of ``owner``'s own that was probably meant to be the hook of ``base``."""
    classes = _own_classes(owner, base)
    for name in _own_methods(classes, base):
        for hook in _meanings(name, base):
            is_helper_of_the_hook = any(name in vars(kind) and hook in vars(kind) for kind in classes)
            if not is_helper_of_the_hook:
                yield name, hook


def unknown_hooks(owner: object, base: type, used: Collection[str]) -> Iterator[str]:
    """Yields each method ``on_...`` of ``owner``'s own that is like no hook of ``base``, and not among the names ``used``."""
    for name in _own_methods(_own_classes(owner, base), base):
        if name.startswith("on_") and name not in used and not _meanings(name, base):
            yield name


def _meanings(name: str, base: type) -> list[str]:
    """Returns, in a list, the hook of ``base`` that a method called ``name`` was probably meant to be; an empty list if none."""
    successor = hinted_hooks().get(name, "")
    if hasattr(base, successor):
        return [successor]
    hooks = [one for one in dir(base) if _looks_like_a_hook(one)]
    return _by_other_words(name, hooks) or get_close_matches(name, hooks, n=1, cutoff=_NEAR)


def _own_classes(owner: object, base: type) -> list[type]:
    return [one for one in type(owner).__mro__ if one not in base.__mro__]


def _own_methods(classes: Sequence[type], base: type) -> list[str]:
    """Returns the public methods, written in Python, that ``classes`` have beside those of ``base``."""
    own = {name: value for kind in classes for name, value in vars(kind).items()}
    return [
        name
        for name, value in own.items()
        if not name.startswith("_") and not hasattr(base, name) and isinstance(value, FunctionType)
    ]


def strings_in(owner: object, base: type, *, without: Collection[str] = ()) -> set[str]:
    """Returns the strings in the code of ``owner``'s own methods, other than those called in ``without``, and of its classes.

    Functions and strings of the same file that the code names count too.  Of a class of fabricamp's between ``owner``'s and
    ``base`` there are none.
    """
    kinds = [kind for kind in _own_classes(owner, base) if not kind.__module__.startswith("fabricamp.")]
    members = [value for kind in kinds for name, value in vars(kind).items() if name not in without]
    found = {value for value in members if isinstance(value, str)}
    files = {kind.__module__: vars(sys.modules[kind.__module__]) for kind in kinds if kind.__module__ in sys.modules}
    seen: set[CodeType] = set()
    while codes := [code for code in _codes(members) if code not in seen]:
        seen.update(codes)
        named = [file[name] for code in codes for name in code.co_names for file in files.values() if name in file]
        found.update(value for value in named if isinstance(value, str))
        members = [value for value in named if isinstance(value, FunctionType) and value.__module__ in files]
        for constant in (constant for code in codes for constant in code.co_consts):
            several = constant if isinstance(constant, tuple) else (constant,)
            found.update(one for one in several if isinstance(one, str))
    return found


def _names_used(classes: Sequence[type]) -> Iterator[str]:
    """Yields the attributes and strings that methods of ``classes`` name: a method that is among them has a caller."""
    for code in _codes([value for kind in classes for value in vars(kind).values()]):
        yield from code.co_names
        yield from (constant for constant in code.co_consts if isinstance(constant, str))


def _codes(members: list[Any]) -> Iterator[CodeType]:
    """Yields the code of methods and properties, and that of functions within them."""
    for wrapper in ("__func__", "fget", "fset", "__wrapped__"):
        members = members + [getattr(value, wrapper, None) for value in members]
    codes = [value.__code__ for value in members if isinstance(value, FunctionType)]
    while codes:
        code = codes.pop()
        yield code
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _by_other_words(name: str, hooks: Sequence[str]) -> list[str]:
    """Returns, in a list, the first of ``hooks`` that has the name ``name`` in other words; an empty list if none has."""
    words = [next((group for group in _OTHER_WORDS if word in group), (word,)) for word in name.split("_")]
    return next(([hook] for hook in map("_".join, product(*words)) if hook in hooks), [])


def _looks_like_a_hook(name: str) -> bool:
    return name.startswith(("on_", "configure_")) or name.endswith(("_step", "_dataloader", "_data"))
