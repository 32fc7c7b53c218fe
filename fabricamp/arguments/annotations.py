"""What a value of a configuration means as the argument that gets it: by the argument's annotation.

A configuration holds null, flags, numbers, text, lists and mappings: an annotation of anything else, such as a path or a
module, refuses none of them, since a constructor often converts what it gets.

First how the text of a value becomes one of the annotated type, as ``1e3`` a number for a float and a name for text, then whether a
value fits.
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

PARTIAL = "_partial_"
"""The key that, if true, leaves the call to whoever gets the object, as for an optimizer without parameters."""

_SEQUENCES = (list, tuple, Sequence, MutableSequence, Iterable, Collection)
_MAPPINGS = (dict, Mapping, MutableMapping)


Texts = str | dict[str, Any] | list[Any] | None
"""What stands in a file for a value: the text of a scalar without quotes, or those within a mapping or a list; None: not known."""

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOTHING = ("", "~", "null", "Null", "NULL")


def kinds_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the annotations of the parameters of ``target`` by name; Any for one without.

    >>> def layer(width: int, rate=0.1): ...
    >>> kinds_of(layer)
    {'width': <class 'int'>, 'rate': typing.Any}
    """
    function = inspect.unwrap(getattr(target, "__init__", target) if isinstance(target, type) else target)
    names = getattr(function, "__globals__", {})
    parameters = inspect.signature(target).parameters
    return {
        name: Any if one.annotation is one.empty else _evaluated(one.annotation, names)
        for name, one in parameters.items()
    }


def read_as(kind: Any, value: Any, texts: Texts) -> Any:
    """Returns what ``texts`` says as ``kind``, or ``value``, which YAML made of it, where it says nothing of this kind.

    Numbers are those of Python, with YAML's ``.inf`` and ``.nan``: not octal by a leading 0, nor sexagesimal by a colon.

    >>> read_as(float, "-.5", "-.5"), read_as(str, 8, "010"), read_as(int, 8, "010"), read_as(typing.Any, 90, "1:30")
    (-0.5, '010', 10, '1:30')
    """
    if isinstance(texts, dict):
        return _read_mapping(kind, value, texts)
    if isinstance(texts, list):
        return _read_list(kind, value, texts)
    if texts is None or texts in _NOTHING:
        return value
    kinds = _alternatives(kind)
    for read in (_as_choice, _as_flag, _as_int, _as_float, _as_text):
        found = read(kinds, texts)
        if found is not None:
            return found
    if isinstance(value, bool):
        return value
    known = {bool, int, float, str, type(None)}
    if all(one in known or typing.get_origin(one) is typing.Literal for one in kinds):
        # It does not fit, and an error shows it: as a number, if it is Python's too, else as it was written.
        return value if value in (_as_int([int], texts), _as_float([float], texts)) else texts
    return _as_number(value, texts)


def _alternatives(kind: Any) -> list[Any]:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return [one for inner in typing.get_args(kind) for one in _alternatives(inner)]
    return [kind]


def _as_choice(kinds: list[Any], text: str) -> Any:
    choices = [one for kind in kinds if typing.get_origin(kind) is typing.Literal for one in typing.get_args(kind)]
    readings = (text, _as_flag([bool], text), _as_int([int], text))
    return next((one for one in choices for read in readings if type(read) is type(one) and read == one), None)


def _as_flag(kinds: list[Any], text: str) -> bool | None:
    if bool not in kinds:
        return None
    others = int in kinds or float in kinds
    return _WORDS.get(text.lower(), None if others else {"1": True, "0": False}.get(text))


def _as_int(kinds: list[Any], text: str) -> int | None:
    if int not in kinds or not text.isascii():
        return None
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return int(text, 0)  # 0x10
    return None


def _as_float(kinds: list[Any], text: str) -> float | None:
    """Returns a number for a float; a whole one stays an int, as some arguments tell 1 batch from 1.0 of all batches."""
    if float not in kinds or not text.isascii():
        return None
    whole = _as_int([int], text)
    if whole is not None:
        return whole
    with contextlib.suppress(ValueError):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return None


def _as_text(kinds: list[Any], text: str) -> str | None:
    return text if str in kinds else None


def _as_number(value: Any, text: str) -> Any:
    """Returns what a value without an annotation is: YAML's, but for numbers, which are Python's."""
    if not isinstance(value, int | float | str):
        return value
    whole = _as_int([int], text)
    if whole is not None:
        return whole
    number = None if text.lstrip("+-").isalpha() else _as_float([float], text)
    if number is None and not isinstance(value, str):
        return text if isinstance(value, int) else value
    return value if number is None else number


def _read_mapping(kind: Any, value: Any, texts: dict[str, Any]) -> Any:
    if not isinstance(value, dict) or TARGET in value:  # a mapping with a target has arguments of its own
        return value
    kinds = _alternatives(kind)
    inner = [typing.get_args(one)[1] for one in kinds if typing.get_origin(one) in _MAPPINGS and typing.get_args(one)]
    of_values = inner[0] if inner else Any
    return {key: read_as(of_values, one, texts.get(str(key))) for key, one in value.items()}


def _read_list(kind: Any, value: Any, texts: list[Any]) -> Any:
    if not isinstance(value, list) or len(value) != len(texts):
        return value
    inner: tuple[Any, ...] = ()
    for one in _alternatives(kind):
        if (typing.get_origin(one) or one) in _SEQUENCES and typing.get_args(one):
            inner = typing.get_args(one)
            if (typing.get_origin(one) or one) is not tuple or Ellipsis in inner:
                inner = (inner[0],) * len(value)
    kinds = inner if len(inner) == len(value) else (Any,) * len(value)
    return [read_as(of_value, one, text) for of_value, one, text in zip(kinds, value, texts, strict=True)]


def misfits(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the annotations of those arguments whose values do not fit them, by name.

    Where the default does not fit either, as in ``name: str = None``, a value of its type is no misfit.

    >>> def layer(width: int, rate: float = 0.1, name: str = None): ...
    >>> misfits(layer, {"width": 4.5, "rate": 1, "name": None})
    {'width': <class 'int'>}
    """
    found = {}
    kinds = kinds_of(target)
    for name, parameter in inspect.signature(target).parameters.items():
        if name not in arguments:
            continue
        value = arguments[name]
        kind = kinds[name]
        as_default = isinstance(value, type(parameter.default)) and not fits(parameter.default, kind)
        if not (as_default or fits(value, kind)):
            found[name] = kind
    return found


def fits(value: Any, kind: Any) -> bool:
    """Returns whether a type checker would let ``value`` pass as ``kind``; lists pass as tuples, 0 and 1 as flags.

    >>> fits(1, float), fits("1", float | None), fits([2, 3], tuple[int, ...]), fits("a", typing.Literal["b"])
    (True, False, True, False)
    >>> fits(1, bool), fits(True, int)
    (True, False)
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
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
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
