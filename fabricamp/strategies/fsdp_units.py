"""Chooses the units of a sharding strategy (submodules that are gathered one at a time), by structure or by class."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fabricamp._utils.containers import tensors_within
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# ~~~ from strategies.units: Chooses the units of a sharding strategy (submodules that are gathered one at a time), by structure or by class.


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE = 1 / 3
"""A repeated module with more than this fraction of the weights is searched for smaller repeated modules."""
_SMALL_MODEL = 64 * 2**20
"""Bytes of weights up to which unit sizes are not checked."""


class Unit(NamedTuple):
    """A submodule with its ``parameters``, gathered together; the parameters of inner units are not included."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]

    @property
    def size(self) -> int:
        """The number of bytes of its full parameters."""
        return sum(one.numel() * one.element_size() for one in self.parameters)


def units_of(module: nn.Module, wanted: str | Sequence[type[nn.Module]]) -> list[Unit]:
    """Returns the units of ``module``, inner ones first; the last one is the module itself with all remaining parameters.

    Raises :class:`ConfigError` for classes without a submodule, for parameters shared by two units, and if one unit holds more than
    half of a large module's weights.
    """
    chosen = _repeated(module) if isinstance(wanted, str) else of_classes(module, wanted, "units")
    units, taken = [], set[int]()
    for name, one in [*reversed(chosen), ("", module)]:
        own = [parameter for parameter in one.parameters() if id(parameter) not in taken]
        taken.update(map(id, own))
        units.append(Unit(name, one, own))
    _check_shared(units)
    _check_sizes(module, units)
    return units


def own_modules(unit: Unit, units: Sequence[Unit]) -> list[nn.Module]:
    """Returns the modules that belong to ``unit`` and to no unit within it."""
    others = {id(one.module) for one in units} - {id(unit.module)}

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if id(child) not in others:
                yield from walk(child)

    return list(dict.fromkeys(walk(unit.module)))


def of_classes(module: nn.Module, classes: Sequence[type[nn.Module]], option: str) -> list[tuple[str, nn.Module]]:
    """Returns the submodules of these classes that have parameters; raises :class:`ConfigError` for a class without submodules."""
    kinds = tuple(classes)
    found = [(name, one) for name, one in module.named_modules() if name and issubclass(type(one), kinds)]
    missing = [kind.__name__ for kind in classes if not any(isinstance(one, kind) for _, one in found)]
    if missing:
        there = sorted({type(one).__name__ for name, one in module.named_modules() if name and any(one.children())})
        raise ConfigError(
            f"FSDP({option}=[{', '.join(missing)}]): {type(module).__name__} has no submodule of this class; it has "
            f"{', '.join(there) or 'none that has submodules'}, leave the others out"
        )
    return [(name, one) for name, one in found if _has_parameters(one)]


def described(units: Sequence[Unit]) -> str:
    """Returns the number of units per class, as words; the last unit counts as "the rest"."""
    kinds = Counter(type(one.module).__name__ for one in units[:-1])
    listed = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    return f"{listed} and the rest" if listed else "the module as a whole"


def _repeated(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the outermost submodules with siblings of the same class: preferably composite layers, else single layers."""
    total = sum(one.numel() for one in module.parameters())
    shared = _shared(module)
    for leaves in (False, True):
        if found := list(_walk(module, "", total * _LARGE, leaves=leaves, shared=shared)):
            return found
    return []


def _walk(
    module: nn.Module, prefix: str, large: float, *, leaves: bool, shared: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{prefix}{name}", one) for name, one in module.named_children() if _has_parameters(one)]
    kinds = Counter(type(one) for _, one in children)
    for name, one in children:
        inner = _walk(one, f"{name}.", large, leaves=leaves, shared=shared)
        fits = leaves or next(one.children(), None) is not None
        if not fits or isinstance(one, _CONTAINERS) or kinds[type(one)] < 2 or _shares(one, shared):
            yield from inner
            continue
        smaller = list(inner) if sum(each.numel() for each in one.parameters()) > large else []
        yield from smaller or [(name, one)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shared(module: nn.Module) -> set[int]:
    """Returns the ids of parameters that several modules own."""
    owners = Counter(id(one) for each in module.modules() for one in each.parameters(recurse=False))
    return {key for key, number in owners.items() if number > 1}


def _shares(module: nn.Module, shared: set[int]) -> bool:
    return any(id(one) in shared for one in module.parameters())


def _check_shared(units: Sequence[Unit]) -> None:
    for unit in units[:-1]:
        own = set(map(id, unit.parameters))
        outside = next(
            (
                (name, other.name)
                for other in units
                if other is not unit
                for each in own_modules(other, units)
                for name, one in each.named_parameters(recurse=False)
                if id(one) in own
            ),
            None,
        )
        if outside is not None:
            raise ConfigError(
                f"FSDP: {unit.name} and {outside[1] or 'the rest'} share a parameter ({outside[0]}), which is gathered with one "
                "unit alone; give units=[...] without the class that holds it, so that both are in the rest"
            )


def _check_sizes(module: nn.Module, units: Sequence[Unit]) -> None:
    total, largest = sum(one.size for one in units), max(units, key=lambda one: one.size)
    if total <= _SMALL_MODEL or largest.size <= total / 2:
        return
    inside = Counter(type(one).__name__ for one in largest.module.modules() if next(one.children(), None) is not None)
    inside.pop(type(module).__name__, None)
    names = ", ".join(f"{name} ({number}x)" for name, number in inside.most_common(5))
    raise ConfigError(
        f"FSDP: {largest.name or 'the rest, outside of all units,'} holds {largest.size / total:.0%} of the weights, which every "
        f"rank would gather at once ({largest.size / 1e9:.2f} GB); give FSDP(units=[...]) the classes of its repeated layers "
        f"(there are: {names or 'only single layers'}), or use strategy='ddp'"
    )


# ~~~ from strategies.gathering: Steps under torch's ``fully_shard``: they gather the parameters outside of all units, and refuse second-order gradients.


def gathering(module: nn.Module, name: str) -> Callable[..., Any]:
    """Returns the method ``name`` wrapped by torch, with its own signature: torch's wrapper shows one argument less."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    written = getattr(module, name)
    register_fsdp_forward_method(module, name)
    wrapped = getattr(module, name)
    return functools.wraps(written)(functools.partial(wrapped))


def refuse_second_order(units: Sequence[Unit]) -> Callable[[], None]:
    """Makes a backward with ``create_graph=True`` through gathered modules raise; returns a function that removes the hooks.

    A unit's weights are freed after its first backward, and the second-order graph would read them: torch then ends the process.
    The last unit is the rest of the module; its modules are called one by one in a step, so each of them gets a hook.
    """
    rest = [one for one in own_modules(units[-1], units)[1:] if next(one.parameters(recurse=False), None) is not None]
    watched = {*rest, *(unit.module for unit in units[:-1])}
    handles = [
        one.register_forward_hook(functools.partial(_watch, functools.partial(_refuse, name)))
        for name, one in units[-1].module.named_modules()
        if one in watched
    ]

    def take_back() -> None:
        for handle in handles:
            handle.remove()

    return take_back


def _watch(refuse: Callable[[Tensor], None], _module: nn.Module, _inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    for tensor in (output,) if type(output) is Tensor else tensors_within(output):
        if tensor.requires_grad:
            tensor.register_hook(refuse)


def _refuse(name: str, _gradient: Tensor) -> None:
    if torch.is_grad_enabled():  # in backward this means create_graph=True
        raise ConfigError(
            f"a gradient of a gradient (create_graph=True) through {name!r} with strategy='fsdp' is not offered, as its weights "
            "are freed after the first backward: use strategy='ddp', or leave the penalty out"
        )
