"""Writes fabricamp/arguments/lightning_methods.toml: the private methods of Lightning's classes, read from its source.

``python tools/write_lightning_methods.py FOLDER`` takes the folder that holds the package ``lightning``.  Nothing is imported.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "fabricamp" / "arguments" / "lightning_methods.toml"
PARTS = ("core", "callbacks", "loggers", "strategies", "profilers", "trainer/trainer.py")
HEAD = """# Private methods of Lightning {version}, with those that a class inherits from other classes of Lightning; read by
# private_methods.py when a class of a program defines a private name.  Written by tools/write_lightning_methods.py.

"""


class Source:
    """The classes of a package, by module and name."""

    def __init__(self, site: Path) -> None:
        self._site = site
        self._trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Returns the syntax tree of a module; None for other packages."""
        if module.split(".", maxsplit=1)[0] != "lightning":
            return None
        if module not in self._trees:
            path = self._site.joinpath(*module.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if not file.is_file():
                return None
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[module]

    def private_methods(self, module: str, name: str) -> set[str]:
        """Returns the private methods of a class and of its bases."""
        tree = self.tree(module)
        if tree is None:
            return set()
        found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
        if found is None:  # imported from another module
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        if name == (alias.asname or alias.name):
                            return self.private_methods(node.module, alias.name)
            return set()
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        own = {node.name for node in found.body if isinstance(node, functions)}
        # Names that start with two underscores cannot be overridden: Python mangles them with the class's name.
        private = {method for method in own if method.startswith("_") and not method.startswith("__")}
        for base in found.bases:
            private |= self.private_methods(module, ast.unparse(base).partition("[")[0])
        return private


def main(site: Path) -> None:
    """Writes the table."""
    source = Source(site)
    root = site / "lightning" / "pytorch"
    files = [
        file
        for part in PARTS
        for file in sorted([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    ]
    rows: dict[str, set[str]] = {}
    for file in files:
        module = ".".join(file.relative_to(site).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rows.setdefault(node.name, set()).update(source.private_methods(module, node.name))
    version = (site / "lightning" / "version.info").read_text().strip()
    lines = []
    for name, found in sorted(rows.items()):
        quoted = ", ".join(f'"{one}"' for one in sorted(found))
        lines += [f"{name} = [{quoted}]"] if found else []
    TARGET.write_text(HEAD.format(version=version) + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
