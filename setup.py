"""What pyproject.toml cannot say: the pages of ``docs`` in the wheel, where ``fabricamp help`` finds them, and the description."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DOCS = ROOT / "docs"
FOLDERS = ("", "how-to", "guides")
"""The folders of ``docs`` whose pages are in the wheel."""
CLONE = re.compile(r"^<!-- clone -->\n.*?^<!-- /clone -->\n|<!-- clone -->.*?<!-- /clone -->", re.DOTALL | re.MULTILINE)
"""A part of the README, of whole lines or within one, that is true in a clone alone."""
PACKAGE = re.compile(r"<!-- package\n(.*?)-->\n?", re.DOTALL)
"""What the description has in its place."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)#]+)[^)]*\)")


class WithPages(build_py):
    """Builds the package with the folder ``pages`` in it."""

    def run(self) -> None:
        """Copies the package's files, then the pages; an editable package reads them from ``docs`` itself."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "fabricamp" / "pages"
        for folder in FOLDERS:
            (target / folder).mkdir(parents=True, exist_ok=True)
            for page in (DOCS / folder).glob("*.md"):
                self.copy_file(str(page), str(target / folder / page.name))


def described(readme: str) -> str:
    """Returns the README for an index, where there is no clone.

    A link to a page of the wheel names its command, others are their text, and pictures that are files go.
    """

    def replaced(match: re.Match[str]) -> str:
        is_picture, text, target = match.groups()
        page = ROOT / target
        if is_picture:
            return ""
        if page.suffix != ".md" or page.parent not in [DOCS / folder for folder in FOLDERS]:
            return text
        command = f"`fabricamp help {page.stem}`"
        if text == target:
            return command
        return f"{text} {command}" if text.endswith("?") else f"{text}: {command}"

    text = PACKAGE.sub(r"\1", CLONE.sub("", readme))
    text = LINK.sub(replaced, text)
    for in_clone, elsewhere in {".venv/bin/": "", "examples/digits/": "", "runs/digits/": "fabricamp_logs/"}.items():
        text = text.replace(in_clone, elsewhere)
    return re.sub(r"\n{3,}", "\n\n", text)


setup(
    cmdclass={"build_py": WithPages},
    long_description=described((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
