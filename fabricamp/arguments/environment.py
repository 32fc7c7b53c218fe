"""Values from environment variables: arguments such as ``PL_TRAINER_MAX_EPOCHS=3``, and references in configurations.

A value that a configuration takes from the environment is used as a value, but written to files as ``${oc.env:NAME}``.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

_REFERENCE = "${oc.env:"


def arguments_from_environment(prefix: str, names: Iterable[str]) -> dict[str, Any]:
    """Returns the arguments of ``names`` that variables such as ``PL_TRAINER_MAX_EPOCHS`` set: Python literals, or text."""
    texts = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in names}
    return {name: _literal(text) for name, text in texts.items() if text}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class FromEnvironment(str):
    """A string with the ``reference`` that it came from; files get the reference, not the value."""

    __slots__ = ("reference",)
    reference: str

    def __new__(cls, value: str, reference: str) -> Self:
        """Returns the string ``value`` with its ``reference``."""
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str.__str__(self), self.reference


class Resolved(NamedTuple):
    """A container's content as plain dicts and lists."""

    values: Any
    """The content to use; strings from the environment are :class:`FromEnvironment`."""
    written: Any
    """The content to write to files, with references in place of values from the environment."""


def resolved(container: object, *, throw_on_missing: bool = False, enum_to_str: bool = False) -> Resolved:
    """Returns the content of an OmegaConf container; the options are those of ``OmegaConf.to_container``."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(container, resolve=True, throw_on_missing=throw_on_missing, enum_to_str=enum_to_str)
    with _references() as asked:
        return _each(container, values, asked)


def exposes(values: Any, written: Any) -> bool:
    """Returns whether ``values`` of a :class:`Resolved` hold something from the environment without a reference.

    Only strings keep a reference; numbers, booleans and keys do not.
    """
    if values is None or values is written or isinstance(values, FromEnvironment):
        return False
    if isinstance(values, dict):
        made = values and not isinstance(written, dict)  # an interpolation made the dict, its keys included
        return bool(made) or any(exposes(value, written[key]) for key, value in values.items())
    if isinstance(values, list):
        texts = written if isinstance(written, list) else [written] * len(values)
        return any(map(exposes, values, texts))
    return True


def first_reference(value: object) -> str:
    """Returns the first string in ``value`` that holds a reference, or "" if there is none."""
    if isinstance(value, str):
        return value if _REFERENCE in value else ""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(first_reference, inner)), "")


def without_references(value: object) -> Any:
    """Returns ``value`` with each :class:`FromEnvironment` replaced by a plain string."""
    return _replaced(value, str.__str__)


def references_alone(value: object) -> Any:
    """Returns ``value`` with each :class:`FromEnvironment` replaced by its reference."""
    return _replaced(value, lambda text: text.reference)


def _replaced(value: object, replace: Callable[[FromEnvironment], str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, replace) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, replace) for item in value]
    return replace(value) if isinstance(value, FromEnvironment) else value


@contextlib.contextmanager
def _references() -> Iterator[list[str]]:
    """Returns a context in which ``oc.env`` resolves to its own reference; yields the list of references that were resolved.

    OmegaConf's resolvers are global, and it has no public way to restore one.
    """
    from omegaconf.basecontainer import BaseContainer

    asked: list[str] = []

    def reference(_config: object, _parent: object, _node: object, _args: object, texts: tuple[str, ...]) -> str:
        asked.append(f"{_REFERENCE}{','.join(texts)}}}")
        return asked[-1]

    before = BaseContainer._resolvers["oc.env"]
    BaseContainer._resolvers["oc.env"] = reference
    try:
        yield asked
    finally:
        BaseContainer._resolvers["oc.env"] = before


def _each(node: Any, values: Any, asked: list[str]) -> Resolved:
    """Returns the :class:`Resolved` form of ``node``; ``values`` is its content with all interpolations resolved."""
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(node, resolve=False)
    assert isinstance(raw, dict | list)
    keys: Any = list(values) if isinstance(values, dict) else range(len(values))
    parts = []
    for key in keys:
        value = values[key]
        if OmegaConf.is_interpolation(node, key):
            parts.append(_interpolated(node, key, value, raw[key], asked))
        elif isinstance(value, dict | list):
            parts.append(_each(node[key], value, asked))
        else:
            parts.append(Resolved(value, value))
    if isinstance(values, list):
        return Resolved([part.values for part in parts], [part.written for part in parts])
    return Resolved(
        dict(zip(keys, [part.values for part in parts], strict=True)),
        dict(zip(keys, [part.written for part in parts], strict=True)),
    )


def _interpolated(node: Any, key: Any, value: Any, raw: str, asked: list[str]) -> Resolved:
    """Returns the :class:`Resolved` form of the interpolation ``raw`` at ``key``.

    The written form has other interpolations resolved if the result is text that holds all references; otherwise it is ``raw``.
    """
    from omegaconf import OmegaConf

    asked.clear()
    try:
        text = node[key]
    except Exception:  # noqa: BLE001 - a user's resolver got a reference in place of the value, and may raise anything
        text = None
    if OmegaConf.is_config(text) and not asked:
        return _each(text, value, asked)  # a reference to another section of the configuration
    if not asked:
        return Resolved(value, value)
    kept = isinstance(value, str) and isinstance(text, str) and all(one in text for one in asked)
    written = text if kept else raw
    return Resolved(_marked(value, written if _REFERENCE in written else asked[-1]), written)


def _marked(value: object, reference: str) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item, reference) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, reference) for item in value]
    return FromEnvironment(value, reference) if isinstance(value, str) else value
