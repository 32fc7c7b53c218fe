"""Writes the modules that only give names of Lightning and apex another path, from ``aliases.toml``: ``make aliases``.

They are real files, so that editors, type checkers and packagers see them.
"""

import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("aliases.toml")
HEAD = "# Written by tools/write_aliases.py"


def modules() -> dict[str, str]:
    """Returns the text of each alias module by its path from the project's root."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {f"fabricamp/{path}": _text(row["doc"], row["names"], row.get("all", False)) for path, row in rows.items()}


def _text(doc: str, names: list[str], exports_all: bool) -> str:
    imports: dict[str, list[tuple[str, str]]] = defaultdict(list)
    has_all = exports_all  # for `import *`, which would also bind submodules
    for one in names:
        module, _, name = one.partition(":")
        original, _, alias = name.partition(" as ")
        has_all = has_all or bool(alias)  # without it a type checker takes `A as B` for private
        imports[module].append((original, alias or original))
    lines = [HEAD, f'"""{doc}"""', ""]
    for module, pairs in sorted(imports.items()):
        lines += [f"from {module} import {original} as {alias}" for original, alias in sorted(pairs, key=_isort_key)]
    if has_all:
        exported = sorted(alias for pairs in imports.values() for _, alias in pairs)
        lines += ["", f"__all__ = {exported}".replace("'", '"')]
    return "\n".join(lines) + "\n"


def _isort_key(pair: tuple[str, str]) -> tuple[int, str]:
    """The order of ruff and isort: constants, classes, functions; each without regard to case."""
    name = pair[0]
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name.lower()


if __name__ == "__main__":
    for path, text in modules().items():
        file = ROOT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
