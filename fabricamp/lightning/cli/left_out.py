"""Says which values of a command line or a file jsonargparse left out without a word.

Two kinds are: a value for an argument that is linked to another one, if it is in a file, and a value for an argument that the class
does not have which a later file or option chose.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

_LOG = logging.getLogger("fabricamp")
_CONFIG = ("--config", "-c")

Given = tuple[str, dict[str, Any]]
"""Where values were given, for a message, and the values as nested dicts."""


def say_left_out(given: Sequence[Given], config: Namespace, links: Mapping[str, str]) -> None:
    """Logs a line for each value of ``given`` that is not in ``config``; ``links`` has the sources by target."""
    for where, values in given:
        for key, why in _left_out(values, config, links, ""):
            _LOG.warning("%s: %s is left out: %s", where, key, why)


def given_by(arguments: Sequence[str]) -> Iterator[Given]:
    """Yields what options and the files of ``--config`` give, in their order; what cannot be read, jsonargparse refuses."""
    waiting = [*arguments]
    while waiting:
        option, equals, value = waiting.pop(0).partition("=")
        if not option.startswith("-"):
            continue
        if not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        if option in _CONFIG:
            yield from _of_config(value)
        elif option.startswith("--") and not option.endswith("+"):
            file, nested = _content(value)
            for word in reversed(option.removeprefix("--").split(".")):
                nested = {word: nested}
            yield file or option, nested


def given_in(files: Sequence[str]) -> Iterator[Given]:
    """Yields what configuration files hold."""
    for file in files:
        yield from _of_config(file)


def _of_config(value: str) -> Iterator[Given]:
    file, content = _content(value)
    if isinstance(content, dict):
        yield file or "--config", content


def _content(value: str) -> tuple[str, Any]:
    """Returns the file that ``value`` names, or an empty string, and what the file holds, or ``value`` itself."""
    try:
        path = Path(value).expanduser()
        if value and path.is_file():
            return value, _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # no path, or a file that is not text
        pass
    return "", _parsed(value)


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # jsonnet, or a text
        return text


def _left_out(values: Any, config: Any, links: Mapping[str, str], at: str) -> Iterator[tuple[str, str]]:
    """Yields (key, reason) for the values that are not in the configuration; keys are those of ``config``, from ``at`` on."""
    if not isinstance(values, dict) or not isinstance(config, Namespace | dict):
        return
    known = config if isinstance(config, dict) else vars(config)
    path = known.get("class_path")
    if isinstance(path, str) and ({*known} <= {"class_path", "init_args", "dict_kwargs"}):
        yield from _left_out_of_class(values, known, path, links, at)
        return
    for key, value in values.items():
        name = f"{at}{key}"
        if reason := _overruled(name, value, known.get(key, _MISSING), links):
            yield name, reason
        elif key in known:
            yield from _left_out(value, known[key], links, f"{name}.")


def _left_out_of_class(
    values: Mapping[str, Any], known: Mapping[str, Any], path: str, links: Mapping[str, str], at: str
) -> Iterator[tuple[str, str]]:
    arguments = values.get("init_args") or {}
    if not {"class_path", "init_args", "dict_kwargs"} & {
        *values
    }:  # --model.size=3 is short for --model.init_args.size=3
        arguments = values
    own = known.get("init_args")
    taken = {} if own is None else vars(own) if isinstance(own, Namespace) else own
    if not isinstance(arguments, dict):
        return
    for key, value in arguments.items():
        name = f"{at}init_args.{key}"
        if reason := _overruled(name, value, taken.get(key, _MISSING), links):
            yield name, reason
        elif key in taken:
            yield from _left_out(value, taken[key], links, f"{name}.")
        elif key not in (known.get("dict_kwargs") or {}) and key not in ("help", "class_path"):
            yield name, f"{path} has no argument of this name"


_MISSING = object()


def _overruled(name: str, value: object, taken: object, links: Mapping[str, str]) -> str:
    """Returns why a value for a linked argument is not used; an empty string if it is."""
    if name not in links or taken == value:
        return ""
    return f"it is linked to {links[name]}, whose value counts"
