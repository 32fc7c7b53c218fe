"""Whether a value of a configuration fits the annotation of the argument that gets it.

A configuration holds null, flags, numbers, text, lists and mappings: an annotation of anything else, such as a path or a
module, refuses none of them, since a constructor often converts what it gets.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

TARGET = "_target_"
"""The key of a mapping that is replaced by the object that it describes, of whichever class."""

_SEQUENCES = (list, tuple, Sequence, MutableSequence, Iterable, Collection)
_MAPPINGS = (dict, Mapping, MutableMapping)


def misfits(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the annotations of those arguments whose values do not fit them, by name.

    Where the default does not fit either, as in ``name: str = None``, a value of its type is no misfit.

    >>> def layer(width: int, rate: float = 0.1, name: str = None): ...
    >>> misfits(layer, {"width": 4.5, "rate": 1, "name": None})
    {'width': <class 'int'>}
    """
    function = inspect.unwrap(getattr(target, "__init__", target) if isinstance(target, type) else target)
    names = getattr(function, "__globals__", {})
    found = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name not in arguments:
            continue
        value = arguments[name]
        kind = _evaluated(parameter.annotation, names)
        as_default = isinstance(value, type(parameter.default)) and not fits(parameter.default, kind)
        if not (as_default or fits(value, kind)):
            found[name] = kind
    return found


def fits(value: Any, kind: Any) -> bool:
    """Returns whether a type checker would let ``value`` pass as ``kind``; lists pass as tuples, and 0 and 1 as flags.

    >>> fits(1, float), fits("1", float | None), fits([2, 3], tuple[int, ...]), fits("a", typing.Literal["b"])
    (True, False, True, False)
    """
    origin = typing.get_origin(kind) or kind
    inner = typing.get_args(kind)
    if isinstance(value, dict) and TARGET in value:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is type(None):
        return value is None
    if origin is bool:
        return value in (True, False) and isinstance(value, int)
    if origin is int:
        return isinstance(value, int)
    if origin is float:
        return isinstance(value, int | float)
    if origin is str:
        return isinstance(value, str)
    if origin in _SEQUENCES:
        is_text = isinstance(value, str) and origin not in (list, tuple, MutableSequence)
        return (is_text or isinstance(value, list)) and _elements_fit(value, origin, inner)
    if origin in _MAPPINGS:
        return isinstance(value, dict) and (not inner or all(fits(one, inner[1]) for one in value.values()))
    return True


def _elements_fit(values: Sequence[Any], origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is tuple and inner and Ellipsis not in inner:
        return len(values) == len(inner) and all(map(fits, values, inner))
    return not inner or all(fits(one, inner[0]) for one in values)


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Returns an annotation that may be text; Any for a name that only type checkers import."""
    holder = types.SimpleNamespace(__annotations__={"argument": annotation})
    with contextlib.suppress(Exception):  # the text may be any expression
        return typing.get_type_hints(holder, names)["argument"]
    return Any
