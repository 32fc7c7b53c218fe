"""Builds the distributions of a release into ``dist/``: ``python tools/release.py``.

The project's address, authors and contact are variables of ``[tool.fabricamp.release]`` in pyproject.toml.  They are written into
the metadata of the distributions, and README's relative links become links to the address.  The tree itself does not change: the
build is made from a copy of the files that git tracks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?://|#|mailto:)[^)]+)\)")


def variables(pyproject: str) -> dict[str, str | list[str]]:
    """Returns address, authors and contact; raises SystemExit, naming all that are empty."""
    found: dict[str, str | list[str]] = tomllib.loads(pyproject)["tool"]["fabricamp"]["release"]
    empty = [name for name, value in found.items() if not value]
    if empty:
        raise SystemExit(
            f"set {', '.join(empty)} in [tool.fabricamp.release] of pyproject.toml first; nothing was built"
        )
    return found


def with_absolute_links(text: str, address: str, version: str) -> str:
    """Returns ``text`` with relative links to files of the release ``version`` at ``address`` (a GitHub repository's paths)."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({address.rstrip('/')}/{kind}/v{version}/{match['target']})"

    return LINK.sub(absolute, text)


def with_metadata(pyproject: str, found: dict[str, str | list[str]]) -> str:
    """Returns the text of pyproject.toml with authors, maintainers' contact and addresses in ``[project]``."""
    authors = []
    for author in found["authors"]:
        name, _, mail = author.partition("<")
        address = f', email = "{mail.rstrip("> ")}"' if mail else ""
        authors.append(f'    {{name = "{name.strip()}"{address}}},')
    maintainers = f'maintainers = [{{name = "contact", email = "{found["contact"]}"}}]'
    address = str(found["address"]).rstrip("/")
    urls = [
        "[project.urls]",
        f'Homepage = "{address}"',
        f'Documentation = "{address}/blob/main/docs/index.md"',
        f'Source = "{address}"',
        f'Changelog = "{address}/blob/main/CHANGELOG.md"',
        f'Issues = "{address}/issues"',
    ]
    people = "\n".join(["authors = [", *authors, "]", maintainers])
    return re.sub(r"^authors = .*", people, pyproject, count=1, flags=re.MULTILINE) + "\n" + "\n".join(urls) + "\n"


def git(*words: str) -> bytes:
    """Returns the output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603, S607


def copy_of_tracked_files(folder: Path) -> None:
    """Unpacks the files of the commit HEAD into ``folder``."""
    archive = git("archive", "HEAD")
    packed = folder.parent / "tree.tar"
    packed.write_bytes(archive)
    with tarfile.open(packed) as tree:
        tree.extractall(folder, filter="data")


def main() -> None:
    """Builds sdist and wheel."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    found = variables(pyproject)
    if git("status", "--porcelain"):
        raise SystemExit("git status shows changes: commit or stash them first; nothing was built")
    version = tomllib.loads(pyproject)["project"]["version"]
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        tree.mkdir()
        copy_of_tracked_files(tree)
        readme = tree / "README.md"
        readme.write_text(with_absolute_links(readme.read_text(), str(found["address"]), version))
        (tree / "pyproject.toml").write_text(with_metadata(pyproject, found))
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(ROOT / "dist"), str(tree)], check=True)  # noqa: S603


if __name__ == "__main__":
    main()
