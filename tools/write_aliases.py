"""Writes the modules that only re-export names under paths of Lightning and apex, from ``aliases.toml``: ``make aliases``.

They are real files, so that editors, type checkers and packagers see them.
"""

import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("aliases.toml")
HEAD = "# Written by tools/write_aliases.py"
LINE_LENGTH = 120

BEHIND_THE_ALIAS = "lightning/packages/"
REFUSED = "fabricamp.lightning.refused"
_TOLD_APART = ("connectors", "environments", "io", "launchers", "precision")
"""Subpackages of Lightning with their own message in migration.toml."""


def modules() -> dict[str, str]:
    """Returns the text of each alias module by its path from the project's root."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {f"fabricamp/{path}": _text(path, row) for path, row in rows.items()}


def _text(path: str, row: dict[str, Any]) -> str:
    imports: dict[str, list[tuple[str, str]]] = defaultdict(list)
    refused = sorted(row.get("refused", []))
    has_all = row.get("all", False) or bool(refused)  # for `import *`, which would also bind submodules
    if refused:
        imports[REFUSED].append(("Refused", "Refused"))
    for one in row.get("names", []):
        module, _, name = one.partition(":")
        original, _, alias = name.partition(" as ")
        has_all = has_all or bool(alias) or original == "*"  # without it a type checker takes `A as B` for private
        imports[module].append((original, alias or original))
    with_all_names = [module for module, pairs in sorted(imports.items()) if ("*", "*") in pairs]
    lines = [HEAD, f'"""{row["doc"]}"""', ""] if imports else [HEAD, f'"""{row["doc"]}"""']
    lines += [f"import {module}" for module in with_all_names]
    for module, pairs in sorted(imports.items()):
        for original, alias in sorted(pairs, key=_isort_key):
            lines += _import(module, original, alias)
    if has_all:
        own = {alias for module, pairs in imports.items() if module != REFUSED for _, alias in pairs if alias != "*"}
        lines += ["", *_list("__all__ = [", [f'"{name}"' for name in sorted(own | set(refused), key=_all_key)], "]")]
        lines += [f"__all__ += {module}.__all__" for module in with_all_names]
    for name in refused:
        lines += ["", "", f"class {name}(Refused):", '    """Not offered: constructing it raises."""', ""]
        lines += [f'    _lightnings_name = "{_part(path)}.{name}"']
    return "\n".join(lines) + "\n"


def _import(module: str, original: str, alias: str) -> list[str]:
    if original == "*":
        return [f"from {module} import *  # noqa: F403"]
    if module == REFUSED:
        return [f"from {module} import {original}"]
    line = f"from {module} import {original} as {alias}"
    return [line] if len(line) <= LINE_LENGTH else [f"from {module} import (", f"    {original} as {alias},", ")"]


def _list(head: str, items: list[str], end: str) -> list[str]:
    """Returns the lines of a list as ``ruff format`` writes it: one, or one for each item."""
    line = f"{head}{', '.join(items)}{end}"
    return [line] if len(line) <= LINE_LENGTH else [head, *(f"    {item}," for item in items), end]


def _part(path: str) -> str:
    """Returns the part of Lightning that an alias module belongs to, such as "plugins" or "fabric"."""
    parts = path.removeprefix(BEHIND_THE_ALIAS).removesuffix(".py").split("/")
    if parts[0] == "fabric" and parts[1] != "plugins":
        return "fabric"
    return ".".join(parts[1:3]) if parts[2] in _TOLD_APART else parts[1]


def _all_key(name: str) -> tuple[int, str]:
    """Returns the sort key of names in ``__all__``: constants, classes, others."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def _isort_key(pair: tuple[str, str]) -> tuple[int, str]:
    """Returns the sort key of ruff and isort: constants, classes, functions; each case-insensitive."""
    name = pair[0]
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name.lower()


if __name__ == "__main__":
    for path, text in modules().items():
        file = ROOT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
