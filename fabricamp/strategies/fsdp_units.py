"""The units of a sharding strategy: submodules that are gathered one at a time.

First the choice of units, by structure or by class, and its checks; then the hooks that refuse a second-order backward.
"""

from __future__ import annotations

import functools
import operator
import statistics
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fabricamp._utils.containers import tensors_within
from fabricamp.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)


def units_of(module: nn.Module, wanted: str | Sequence[type[nn.Module] | str]) -> list[Unit]:
    """Returns the units of ``module``, inner ones first; the last one is the module itself with all remaining parameters.

    Raises :class:`ConfigError` for classes without a submodule, for names of none, for parameters shared by two units, and if one
    unit holds more than half of a large module's weights.
    """
    chosen = _repeated(module) if isinstance(wanted, str) else given_modules(module, wanted, "FSDP(units=")
    units = []
    owned: set[int] = set()
    # Reversed, so that inner units come first and outer ones get the parameters that are left.
    for name, submodule in [*reversed(chosen), ("", module)]:
        own = [parameter for parameter in submodule.parameters() if id(parameter) not in owned]
        owned.update(map(id, own))
        units.append(Unit(name, submodule, own))
    _check_shared(units)
    _check_sizes(module, units)
    return units


def own_modules(unit: Unit, units: Sequence[Unit]) -> list[nn.Module]:
    """Returns the modules that belong to ``unit`` and to no unit within it."""
    others = {id(other.module) for other in units} - {id(unit.module)}

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if id(child) not in others:
                yield from walk(child)

    return list(dict.fromkeys(walk(unit.module)))


def of_classes(module: nn.Module, classes: Sequence[type[nn.Module]], option: str) -> list[tuple[str, nn.Module]]:
    """Returns the submodules of these classes that have parameters; raises :class:`ConfigError` for a class without submodules.

    ``option``: the argument that names them, such as "FSDP(units=", for the message.
    """
    submodules = [(name, submodule) for name, submodule in module.named_modules() if name]
    matching = [(name, submodule) for name, submodule in submodules if issubclass(type(submodule), tuple(classes))]
    missing = [wanted.__name__ for wanted in classes if not any(isinstance(match, wanted) for _, match in matching)]
    if missing:
        composite = sorted({type(submodule).__name__ for _, submodule in submodules if any(submodule.children())})
        raise ConfigError(
            f"{option}[{', '.join(missing)}]): {type(module).__name__} has no submodule of this class; it has "
            f"{', '.join(composite) or 'none that has submodules'}, leave the others out"
        )
    return [(name, submodule) for name, submodule in matching if _has_parameters(submodule)]


def given_modules(
    module: nn.Module, wanted: Sequence[type[nn.Module] | str], option: str
) -> list[tuple[str, nn.Module]]:
    """Returns the submodules of these classes and names, in the order of ``named_modules()``; ``option`` as in of_classes."""
    classes = [one for one in wanted if not isinstance(one, str)]
    chosen = {id(submodule) for _, submodule in (of_classes(module, classes, option) if classes else ())}
    chosen |= {id(_of_name(module, name, option)) for name in wanted if isinstance(name, str)}
    return [(name, submodule) for name, submodule in module.named_modules() if id(submodule) in chosen]


def _of_name(module: nn.Module, name: str, option: str) -> nn.Module:
    """Returns the submodule; raises :class:`ConfigError` if there is none, or none with parameters that is called."""
    submodules = dict(module.named_modules(remove_duplicate=False))
    submodule: nn.Module | None = submodules.get(name) if name else None
    beginning = f"{option}[{name!r}]): {type(module).__name__}"
    if submodule is None:
        raise ConfigError(f"{beginning} has no submodule of this name{nearest(name, filter(None, submodules))}")
    if not _has_parameters(submodule):
        raise ConfigError(f"{beginning}.{name} has no parameters; leave it out")
    if isinstance(submodule, (nn.ModuleList, nn.ModuleDict)):
        raise ConfigError(
            f"{beginning}.{name} is a {type(submodule).__name__}, which is never called; name the modules in it, or give a class"
        )
    return submodule


def stays_gathered(units: Sequence[Unit], wanted: str | Sequence[type[nn.Module] | str]) -> nn.Module | None:
    """Returns a layer given by name behind all other units, as a head: backward begins with it.  None if there is none."""
    last = units[0]
    is_named = len(units) > 1 and not isinstance(wanted, str) and last.name in wanted
    return last.module if is_named and not _has_children(last.module) else None


def layers_to_name(units: Sequence[Unit]) -> list[str]:
    """Returns names of layers in the rest with more than half of a usual unit, if the rest is larger than one and not small.

    The rest stays gathered for a whole step.  Layers that share a parameter have to be in it.
    """
    *others, rest = units
    usual = statistics.median([unit.size for unit in others] or [rest.size])
    if rest.size <= max(usual, _SMALL_MODEL):
        return []
    modules = own_modules(rest, units)
    owners = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    named = []
    for name, module in rest.module.named_modules():
        own = list(module.parameters(recurse=False))
        is_alone = module in modules[1:] and not _has_children(module) and all(owners[id(one)] == 1 for one in own)
        if is_alone and sum(one.numel() * one.element_size() for one in own) > usual / 2:
            named.append(name)
    return named


def described(units: Sequence[Unit]) -> str:
    """Returns the number of units per class, as words; the last unit counts as "the rest"."""
    counts = Counter(type(unit.module).__name__ for unit in units[:-1])
    listed = ", ".join(f"{number} {name}" for name, number in counts.items())
    return f"{listed} and the rest" if listed else "the module as a whole"


def _repeated(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the outermost submodules with siblings of the same class: preferably composite layers, else single layers."""
    total = sum(parameter.numel() for parameter in module.parameters())
    owners = Counter(
        id(parameter) for submodule in module.modules() for parameter in submodule.parameters(recurse=False)
    )
    shared = {parameter for parameter, number in owners.items() if number > 1}
    for leaves in (False, True):
        if repeated := list(_walk(module, "", total * _LARGE, leaves=leaves, shared=shared)):
            return repeated
    return []


def _walk(
    module: nn.Module, prefix: str, large: float, *, leaves: bool, shared: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the repeated submodules below ``module``; ``leaves``: single layers count too, ``shared``: ids of parameters."""
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_parameters(child)]
    counts = Counter(type(child) for _, child in children)
    for name, child in children:
        inner = _walk(child, f"{name}.", large, leaves=leaves, shared=shared)
        is_layer = (leaves or _has_children(child)) and not isinstance(child, _CONTAINERS)
        # A shared parameter is gathered with one unit alone, so modules that share one stay in the rest.
        shares = any(id(parameter) in shared for parameter in child.parameters())
        if not is_layer or counts[type(child)] < 2 or shares:
            yield from inner
            continue
        smaller = list(inner) if sum(parameter.numel() for parameter in child.parameters()) > large else []
        yield from smaller or [(name, child)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _check_shared(units: Sequence[Unit]) -> None:
    """Raises :class:`ConfigError` if a unit shares a parameter with another unit or with the rest."""
    owners = {id(parameter): number for number, unit in enumerate(units[:-1]) for parameter in unit.parameters}
    found = [
        (owner, parameter_name, other.name)
        for number, other in enumerate(units)
        for module in own_modules(other, units)
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if (owner := owners.get(id(parameter), number)) != number
    ]
    if found:
        owner, parameter_name, other_name = min(found, key=operator.itemgetter(0))
        raise ConfigError(
            f"FSDP: {units[owner].name} and {other_name or 'the rest'} share a parameter ({parameter_name}), which is gathered "
            "with one unit alone; give units=[...] without the class or name that holds it, so that both are in the rest"
        )


def _check_sizes(module: nn.Module, units: Sequence[Unit]) -> None:
    total = sum(unit.size for unit in units)
    largest = max(units, key=lambda unit: unit.size)
    if total <= _SMALL_MODEL or largest.size <= total / 2:
        return
    inside = Counter(type(layer).__name__ for layer in largest.module.modules() if _has_children(layer))
    inside.pop(type(module).__name__, None)
    names = ", ".join(f"{name} ({number}x)" for name, number in inside.most_common(5))
    raise ConfigError(
        f"FSDP: {largest.name or 'the rest, outside of all units,'} holds {largest.size / total:.0%} of the weights, which every "
        f"rank would gather at once ({largest.size / 1e9:.2f} GB); give FSDP(units=[...]) the classes of its repeated layers "
        f"(there are: {names or 'only single layers'}), or use strategy='ddp'"
    )


def refuse_second_order(units: Sequence[Unit]) -> Callable[[], None]:
    """Makes a backward with ``create_graph=True`` through gathered modules raise; returns a function that removes the hooks.

    A unit's weights are freed after its first backward, and the second-order graph would read them: torch then ends the process.
    The last unit is the rest of the module; its modules are called one by one in a step, so each of them gets a hook.
    """
    root = units[-1]
    rest = [
        module for module in own_modules(root, units)[1:] if next(module.parameters(recurse=False), None) is not None
    ]
    watched = {*rest, *(unit.module for unit in units[:-1])}
    handles = [
        module.register_forward_hook(functools.partial(_watch, functools.partial(_refuse, name)))
        for name, module in root.module.named_modules()
        if module in watched
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _watch(refuse: Callable[[Tensor], None], _module: nn.Module, _inputs: object, output: object) -> None:
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
