"""Values that a configuration takes from the environment: used as they are, written down as the reference, ``${oc.env:NAME}``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

_REFERENCE = "${oc.env:"


class FromEnvironment(str):
    """A string that knows which ``reference`` it came from; what is written to a file is that, not the value."""

    __slots__ = ("reference",)
    reference: str

    def __new__(cls, value: str, reference: str) -> Self:
        """``value``, of ``reference``."""
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str.__str__(self), self.reference


class Resolved(NamedTuple):
    """A container's content as plain dicts and lists."""

    values: Any
    """To be used; strings that the environment decides are :class:`FromEnvironment`."""
    written: Any
    """To be written: with references where the environment decides."""


def resolved(container: Any, *, throw_on_missing: bool = False, enum_to_str: bool = False) -> Resolved:
    """Returns the content of an OmegaConf container; the options are those of ``OmegaConf.to_container``."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(container, resolve=True, throw_on_missing=throw_on_missing, enum_to_str=enum_to_str)
    with _references() as asked:
        return _each(container, values, asked)


def exposes(values: Any, written: Any) -> bool:
    """Returns whether ``values`` of a :class:`Resolved` hold something of the environment that knows no reference.

    That is a number, a truth value, a key: anything but a string.
    """
    if values is None or values is written or isinstance(values, FromEnvironment):
        return False
    if isinstance(values, dict):
        made = values and not isinstance(written, dict)  # keys and all
        return bool(made) or any(exposes(value, written[key]) for key, value in values.items())
    if isinstance(values, list):
        texts = written if isinstance(written, list) else [written] * len(values)
        return any(map(exposes, values, texts))
    return True


def first_reference(value: Any) -> str:
    """Returns the first string in ``value`` that holds a reference; nothing where there is none."""
    if isinstance(value, str):
        return value if _REFERENCE in value else ""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(first_reference, inner)), "")


def without_references(value: Any) -> Any:
    """Returns ``value`` with ordinary strings, for code that is not to know where they came from."""
    if isinstance(value, dict):
        return {key: without_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_references(item) for item in value]
    return str.__str__(value) if isinstance(value, FromEnvironment) else value


@contextlib.contextmanager
def _references() -> Iterator[list[str]]:
    """Within it ``oc.env`` gives its own text; the list tells whether it was asked.

    OmegaConf's resolvers are the process's, and it has no public way to put one back as it was.
    """
    from omegaconf.basecontainer import BaseContainer

    asked: list[str] = []

    def reference(_config: Any, _parent: Any, _node: Any, _args: Any, texts: tuple[str, ...]) -> str:
        asked.append(f"{_REFERENCE}{','.join(texts)}}}")
        return asked[-1]

    before = BaseContainer._resolvers["oc.env"]
    BaseContainer._resolvers["oc.env"] = reference
    try:
        yield asked
    finally:
        BaseContainer._resolvers["oc.env"] = before


def _each(node: Any, values: Any, asked: list[str]) -> Resolved:
    """What of ``values``, the content of ``node``, is used and what is written."""
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
    """The same for one interpolation, ``raw``; resolved as far as that gives a text with the references in it."""
    from omegaconf import OmegaConf

    asked.clear()
    try:
        text = node[key]
    except Exception:  # noqa: BLE001 - a resolver of the user's, given a reference in place of what it can read
        text = None
    if OmegaConf.is_config(text) and not asked:
        return _each(text, value, asked)  # it stands elsewhere in the configuration
    if not asked:
        return Resolved(value, value)
    kept = isinstance(value, str) and isinstance(text, str) and all(one in text for one in asked)
    written = text if kept else raw
    return Resolved(_marked(value, written if _REFERENCE in written else asked[-1]), written)


def _marked(value: Any, reference: str) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item, reference) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, reference) for item in value]
    return FromEnvironment(value, reference) if isinstance(value, str) else value
