"""What O1 casts, by name.  torch.autocast does it; a name that a script adds is cast too, one that it removes is told of."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fabricamp.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["added", "describe", "functional_overrides", "tensor_overrides", "torch_overrides"]

logger = logging.getLogger("fabricamp")

_RULES = {"FP16_FUNCS": "half", "FP32_FUNCS": "float", "CASTS": "promote"}
_MODULES = (torch_overrides, functional_overrides, tensor_overrides)
_AS_SHIPPED = {
    (module, name): frozenset(getattr(module, name)) for module in _MODULES for name in _RULES if hasattr(module, name)
}


def added() -> Iterator[tuple[Any, str, str]]:
    """Yields (module, function name, "half", "float" or "promote") of what scripts have added to the lists."""
    for (module, key), shipped in _AS_SHIPPED.items():
        names = getattr(module, key)
        yield from ((module.MODULE, name, _RULES[key]) for name in names if name not in shipped)
        removed = sorted(shipped.difference(names))
        if removed:
            logger.warning(
                "fabricamp: %s are no longer in amp.lists' %s, and torch.autocast still casts them; call such a function inside "
                "amp.disable_casts()",
                ", ".join(removed), key,
            )  # fmt: skip


def describe() -> str:
    """Returns the lists as text."""
    lines = ["O1 casts through torch.autocast:"]
    for module, key in _AS_SHIPPED:
        lines.append(f"{module.MODULE.__name__}, {_RULES[key]}: {' '.join(getattr(module, key))}")
    return "\n".join(lines)
