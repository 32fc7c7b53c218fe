"""What O1 casts, by name.  torch.autocast does it; a name that a script adds is cast too, one that it removes is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["changed", "describe", "functional_overrides", "tensor_overrides", "torch_overrides"]

_RULES = {"FP16_FUNCS": "half", "FP32_FUNCS": "float", "CASTS": "promote"}
_MODULES = (torch_overrides, functional_overrides, tensor_overrides)
_AS_SHIPPED = {
    (module, name): frozenset(getattr(module, name)) for module in _MODULES for name in _RULES if hasattr(module, name)
}


def changed() -> Iterator[tuple[Any, str, str]]:
    """Yields (module, function name, "half", "float", "promote" or "none") of what scripts have added to the lists or removed."""
    for (module, key), shipped in _AS_SHIPPED.items():
        names = getattr(module, key)
        yield from ((module.MODULE, name, _RULES[key]) for name in names if name not in shipped)
        removed = shipped.difference(*_names_of(module))
        yield from ((module.MODULE, name, "none") for name in sorted(removed))


def _names_of(module: Any) -> list[list[str]]:
    """The lists of a module as they are now: a name may go from one to another."""
    return [getattr(module, key) for key in _RULES if hasattr(module, key)]


def describe() -> str:
    """Returns the lists as text."""
    lines = ["O1 casts through torch.autocast:"]
    for module, key in _AS_SHIPPED:
        lines.append(f"{module.MODULE.__name__}, {_RULES[key]}: {' '.join(getattr(module, key))}")
    return "\n".join(lines)
