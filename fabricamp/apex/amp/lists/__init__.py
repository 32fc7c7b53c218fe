"""The functions that O1 casts, by name.

torch.autocast casts most of them, on GPUs more than elsewhere, and wrappers cast the rest.  Names that a script adds to the lists
are cast too; names that it removes are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fabricamp.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

_RULES = {"FP16_FUNCS": "half", "FP32_FUNCS": "float", "CASTS": "promote"}
_MODULES = (torch_overrides, functional_overrides, tensor_overrides)
_AS_SHIPPED = {
    (module, name): frozenset(getattr(module, name)) for module in _MODULES for name in _RULES if hasattr(module, name)
}

_BESIDE_AUTOCAST_ON_GPUS: Final = {
    "FP16_FUNCS": frozenset[str](),
    "FP32_FUNCS": frozenset(
        {
            *("cpu", "__ipow__", "std", "var", "gelu", "interpolate", "grid_sample", "local_response_norm"),
            *("multilabel_soft_margin_loss", "ctc_loss"),
        }
    ),
    "CASTS": frozenset({"equal"}),
}
"""The functions that torch.autocast does not cast as listed on GPUs, or not in every version."""
_BESIDE_AUTOCAST_ELSEWHERE: Final = {
    "FP16_FUNCS": frozenset({"addmv", "addr", "mv"}),
    "FP32_FUNCS": None,  # nearly all of them
    "CASTS": frozenset({"bilinear", "cross", "dot", "equal"}),
}


def beside_autocast(device_type: str) -> Iterator[tuple[Any, str, str]]:
    """Yields (module, function name, "half", "float" or "promote") for the functions that torch.autocast does not cast."""
    table = _BESIDE_AUTOCAST_ON_GPUS if device_type == "cuda" else _BESIDE_AUTOCAST_ELSEWHERE
    for (module, key), shipped in _AS_SHIPPED.items():
        chosen = table[key]
        for name in shipped.intersection(getattr(module, key)):
            if chosen is None or name in chosen:
                yield module.MODULE, name, _RULES[key]


def in_place() -> Iterator[tuple[Any, str, str]]:
    """Yields (module, function name, "float" or "half") for the functions that write into their first argument."""
    pairs = [(torch_overrides, "FP32_FUNCS"), (tensor_overrides, "FP32_FUNCS"), (tensor_overrides, "FP16_FUNCS")]
    for module, key in pairs:
        names = (f"{name}_" for name in getattr(module, key))
        yield from ((module.MODULE, name, _RULES[key]) for name in names if hasattr(module.MODULE, name))


def changed() -> Iterator[tuple[Any, str, str]]:
    """Yields (module, function name, "half", "float", "promote" or "none") for names that scripts have added or removed."""
    for (module, key), shipped in _AS_SHIPPED.items():
        names = getattr(module, key)
        yield from ((module.MODULE, name, _RULES[key]) for name in names if name not in shipped)
        # From all lists of the module: a script may move a name from one to another.
        removed = shipped.difference(*(getattr(module, one) for one in _RULES if hasattr(module, one)))
        yield from ((module.MODULE, name, "none") for name in sorted(removed))


def describe() -> str:
    """Returns the lists as text."""
    lines = ["O1 casts:"]
    for module, key in _AS_SHIPPED:
        lines.append(f"{module.MODULE.__name__}, {_RULES[key]}: {' '.join(getattr(module, key))}")
    return "\n".join(lines)
