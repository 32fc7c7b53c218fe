"""Configurations that Lightning wrote name every argument of its classes; here are sorted those that fabricamp's class lacks."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Final

import yaml

from fabricamp.lightning import names

_LIGHTNINGS: Final = ("lightning.", "pytorch_lightning.")


def read_lightnings_arguments() -> None:
    """Makes jsonargparse's reader of YAML call :func:`for_our_classes`; called once."""
    from jsonargparse import get_loader, set_loader

    load = get_loader("yaml")

    def load_and_sort(text: str) -> Any:
        return for_our_classes(load(text))

    set_loader("yaml", load_and_sort, (yaml.YAMLError,))


def for_our_classes(value: Any) -> Any:
    """Returns ``value`` with the arguments of Lightning's classes as fabricamp's take them.

    Of an argument that the class has no name for, null is left out, as it is Lightning's default; another value goes to the
    constructor unchecked, if it takes any name: it knows what is allowed.  A default that could not be written is left out.
    """
    if isinstance(value, list):
        return [for_our_classes(one) for one in value]
    if not isinstance(value, dict):
        return value
    value = {key: for_our_classes(one) for key, one in value.items()}
    path, arguments = value.get("class_path"), value.get("init_args")
    if not (
        isinstance(path, str) and path.startswith(_LIGHTNINGS) and isinstance(arguments, dict) and names.is_installed()
    ):
        return value
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # jsonargparse says that there is no such class
        return value
    if not isinstance(kind, type) or not kind.__module__.startswith("fabricamp."):
        return value
    named, more = arguments_of_ours(kind, arguments)
    more |= value.get("dict_kwargs") or {}
    return {**value, "init_args": named} | ({"dict_kwargs": more} if more else {})


def arguments_of_ours(kind: type, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns those of ``arguments``, of Lightning's class, that ``kind`` names, and those for its constructor to judge."""
    parameters = inspect.signature(kind).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    written = {key: one for key, one in arguments.items() if not _is_unwritten(one)}
    unnamed = {key: one for key, one in written.items() if key not in parameters}
    given = {key: one for key, one in unnamed.items() if one is not None}
    named = {key: one for key, one in written.items() if key not in unnamed}
    return (named, given) if takes_any else ({**named, **given}, {})


def _is_unwritten(value: object) -> bool:
    """Returns whether jsonargparse wrote, in place of a default that is an object, that it has no text for it."""
    return isinstance(value, str) and value.startswith("Unable to serialize instance")
