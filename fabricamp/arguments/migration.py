"""Names from other trainers and from Lightning 1, and what to write instead: the tables of ``migration.toml``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any


@functools.cache
def _tables() -> dict[str, Any]:
    """Reads the file once; the tables are a data file, because only errors and hints need its 300 lines."""
    return tomllib.loads(resources.files(__package__).joinpath("migration.toml").read_text(encoding="utf-8"))


@functools.cache
def meanings(where: str) -> Mapping[str, str]:
    """Returns the hints for names given at ``where``, such as "Trainer" or "self.log"; a name may be a pattern with ``*``."""
    rows: dict[str, str] = _tables()["arguments"].get(where, {})
    return {name: words for names, words in rows.items() for name in names.split()}


def ignored_at_none(where: str) -> list[str]:
    """Returns the arguments of ``where`` that configurations written by Lightning contain, as None."""
    names: list[str] = _tables()["ignored_at_none"][where]
    return names


def refused_hooks() -> Mapping[str, str]:
    """Returns the hooks of Lightning 1 that are refused, and what is called instead."""
    hooks: dict[str, str] = _tables()["hooks"]["refused"]
    return hooks


def hinted_hooks() -> Mapping[str, str]:
    """Returns the other hooks of Lightning 1, and what is called instead; a program may have methods of these names."""
    hooks: dict[str, str] = _tables()["hooks"]["hinted"]
    return hooks


def not_offered() -> Mapping[str, str]:
    """Returns what to do instead of each name that Lightning has and fabricamp does not; names are without ``fabricamp.``."""
    words: dict[str, str] = _tables()["not_offered"]
    return words


def not_offered_paths() -> Mapping[str, str]:
    """Returns the other paths of Lightning to the names of :func:`not_offered`."""
    paths: dict[str, str] = _tables()["not_offered_paths"]
    return paths


def lightning_constructors() -> Mapping[str, list[str]]:
    """Returns the constructor arguments of each class of Lightning that fabricamp has a class for, such as "callbacks.Timer"."""
    classes: dict[str, list[str]] = _tables()["lightning_constructors"]
    return classes
