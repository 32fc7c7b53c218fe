"""Puts the pages of ``docs`` into the wheel, where ``fabricamp help`` finds them; all else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DOCS = Path(__file__).parent / "docs"


class WithPages(build_py):
    """Builds the package with the folder ``pages`` in it."""

    def run(self) -> None:
        """Copies the package's files, then the pages; an editable package reads them from ``docs`` itself."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "fabricamp" / "pages"
        for folder in ("", "how-to"):
            (target / folder).mkdir(parents=True, exist_ok=True)
            for page in (DOCS / folder).glob("*.md"):
                self.copy_file(str(page), str(target / folder / page.name))


setup(cmdclass={"build_py": WithPages})
