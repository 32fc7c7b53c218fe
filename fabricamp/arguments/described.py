"""The arguments of a class or function as text: names, defaults, and their descriptions from the docstring."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

_ARGUMENT = re.compile(r"^( {4})\*{0,2}(\w+)(?: \([^)]*\))?: ")
_WIDTH = 100


def described(title: str, target: Callable[..., Any]) -> str:
    """Returns ``title``, followed by one paragraph per argument of ``target``."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError:  # written in C
        parameters = []
    meanings = {**_meanings(getattr(target, "__init__", None)), **_meanings(target)}
    lines = [f"{title}:"]
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        default = "required" if one.default is one.empty else f"default {one.default!r}"
        text = f"{one.name} ({default})" + (f": {meanings[one.name]}" if one.name in meanings else "")
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines if len(lines) > 1 else [*lines, "  takes no arguments"])


def _meanings(target: object) -> dict[str, str]:
    """Returns the descriptions in the section "Args:" of the docstring of ``target``, by argument."""
    _, _, section = (inspect.getdoc(target) or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        if match := _ARGUMENT.match(line):
            name = match[2]
            found[name] = line[match.end() :].strip()
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return {name: text.replace("``", "").replace(":class:", "") for name, text in found.items()}
