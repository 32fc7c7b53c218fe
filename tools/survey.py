"""Lists the names of Lightning that a package's sources use, and those that the alias lacks: ``python tools/survey.py PATH...``.

A path is a wheel, an sdist, a folder or a file.  The sources are read, never executed.  A source uses a name if it imports the name
from ``lightning``, ``pytorch_lightning`` or ``lightning_fabric``, or reads it as an attribute of an imported module.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Final

from fabricamp.lightning import names

_SECOND_NAMES: Final = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
_DISTRIBUTION: Final = re.compile(r"(?P<name>.+?)-(?P<version>\d[^-]*?)(-.*\.whl|\.tar\.gz|\.zip)")


@dataclass
class Survey:
    """The names that one package uses; ``missing`` are those that the alias lacks."""

    library: str
    version: str
    asked: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)


def survey(path: Path) -> Survey:
    """Returns the names that the sources at ``path`` use."""
    match = _DISTRIBUTION.fullmatch(path.name)
    result = Survey(match["name"], match["version"]) if match else Survey(path.stem, "")
    for text in _sources(path):
        for dotted in _names_in(ast.parse(text)):
            name, there = _resolved(dotted)
            result.asked.add(name)
            if not there:
                result.missing.add(name)
    return result


def _sources(path: Path) -> Iterator[str]:
    """Yields the text of each Python file of a folder, a wheel or an sdist."""
    if path.is_dir():
        yield from (file.read_text(encoding="utf-8") for file in sorted(path.rglob("*.py")))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            yield from (wheel.read(one).decode() for one in wheel.namelist() if one.endswith(".py"))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as sdist:
            files = [(one, sdist.extractfile(one)) for one in sdist if one.name.endswith(".py")]
            yield from (file.read().decode() for _, file in files if file is not None)
    else:
        yield path.read_text(encoding="utf-8")


def _names_in(tree: ast.Module) -> Iterator[str]:
    """Yields the dotted names of Lightning that a file imports, and the attributes that it reads of imported names."""
    bound: dict[
        str, str
    ] = {}  # keyed by the file's own names; a function's local import counts for the file, because names are seldom reused
    nodes = [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                bound[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
                yield from _of_lightning(one.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _of_lightning(node.module)
            for one in node.names:
                if one.name != "*":
                    bound[one.asname or one.name] = f"{node.module}.{one.name}"
                    yield from _of_lightning(f"{node.module}.{one.name}")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in bound and all(part.isidentifier() for part in rest):
                yield from _of_lightning(".".join([bound[first], *rest]))


def _of_lightning(dotted: str) -> Iterator[str]:
    package, _, path = dotted.partition(".")
    if package in names.PACKAGES:
        yield f"{_SECOND_NAMES.get(package, package)}.{path}".removesuffix(".")


def _resolved(dotted: str) -> tuple[str, bool]:
    """Returns ``dotted`` cut after its first name that is not a module or is missing, and whether the alias has that name."""
    parts = dotted.split(".")
    found: object = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        if not isinstance(found, ModuleType):
            return ".".join(parts[:index]), True
        try:
            found = getattr(found, part)
        except AttributeError:
            return ".".join(parts[: index + 1]), False
    return dotted, True


def _table(surveys: list[Survey]) -> str:
    lines = ["| library | version | names | missing |", "|---|---|---|---|"]
    for one in surveys:
        missing = ", ".join(f"`{name.removeprefix('lightning.')}`" for name in sorted(one.missing)) or "none"
        lines.append(f"| {one.library} | {one.version} | {len(one.asked)} | {missing} |")
    return "\n".join(lines)


if __name__ == "__main__":
    names.install()
    sys.stdout.write(_table([survey(Path(path)) for path in sys.argv[1:]]) + "\n")
