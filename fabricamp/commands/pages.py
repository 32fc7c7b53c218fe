"""``fabricamp help TOPIC``: shows a page of the documentation, which is installed with the package."""

from __future__ import annotations

import importlib.metadata
import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fabricamp.errors import ConfigError, nearest
from fabricamp.messages import is_terminal

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("", "how-to/", "guides/")
_CONTENTS_PAGE = "index"
_NO_TOPICS = (_CONTENTS_PAGE, "charts", "changes", "features")
"""Pages of the site that a terminal has no use for: lists of links, pictures."""
_CONTENTS: Final = re.compile(r"^```{toctree}\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CODE_OR_LINK: Final = re.compile(
    r"^```.*?^```|`[^`\n]+`|(?<!\\)(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)


def _folder() -> Path:
    installed = _PACKAGE / "pages"
    return installed if installed.is_dir() else _PACKAGE.parent / "docs"  # a clone


def topics() -> dict[str, Path]:
    """Returns the pages by topic, such as "slow-data" or "from-lightning"."""
    folder = _folder()
    files = [file for part in _FOLDERS for file in folder.glob(f"{part}*.md")]
    pages = sorted(files, key=lambda page: page.stem)
    return {page.stem: page for page in pages if page.stem not in _NO_TOPICS}


def show(topic: str | None) -> None:
    """Prints the page on ``topic``, in a pager on a terminal; without a topic all of them, a line each, as the site orders them.

    Raises:
        ConfigError: for a topic that there is no page on.
    """
    found = topics()
    if topic is None:
        width = max(map(len, found), default=0)
        print("a page: fabricamp help TOPIC")
        for heading, names in _groups(found):
            print("", heading, *(f"  {name:{width}}  {_title(found[name])}" for name in names), sep="\n")
        return
    topic = Path(topic).stem if topic.endswith(".md") else topic  # as pages name each other
    if topic not in found:
        within = ", ".join(name for name in found if topic.lower() in name)
        meant = f"; did you mean {within}?" if within and topic else nearest(topic, found) or _mentions(topic, found)
        raise ConfigError(f"there is no page on {topic!r}{meant} (`fabricamp help` lists the topics)")
    text = _for_terminals(found[topic], found)
    if not is_terminal(sys.stdout):
        print(text, end="")
        return
    from rich import get_console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-R")  # else it shows the codes of colours
    with get_console().pager(styles=True):
        get_console().print(Markdown(text))


def _groups(found: Mapping[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Yields headings and topics in the order of the site's contents; first those to begin with, last those that are not there."""
    left = dict(found)
    for tree in _CONTENTS.findall((_folder() / f"{_CONTENTS_PAGE}.md").read_text(encoding="utf-8")):
        heading = re.search(r"^:caption: (.+)$", tree, re.MULTILINE)
        pages = re.findall(r"^(?!:)(?:.*<)?([^<>\n]+?)>?$", tree, re.MULTILINE)
        names = [name for page in pages if left.pop(name := posixpath.basename(page), None)]
        if names:
            yield heading[1] if heading else "Start here", names
    if left:
        yield "More", list(left)


def _for_terminals(page: Path, found: Mapping[str, Path]) -> str:
    """Returns a page with words for its links and pictures: a command for another page, an address or a path for other files."""
    folder = _folder()
    root = _project_address()

    def replaced(match: re.Match[str]) -> str:
        is_picture, text, target, _ = match.groups()
        if text is None:  # code
            return match[0]
        if is_picture:
            return f"(picture: {text})"
        if not target:  # a heading of this page
            return text
        path = posixpath.normpath(posixpath.join(page.parent.relative_to(folder).as_posix(), target))
        is_page = folder / path in found.values()
        file = _from_root(path)
        where = (
            f"`fabricamp help {posixpath.basename(path)[:-3]}`"
            if is_page
            else f"{root}{file}"
            if root
            else f"{file} (in the source)"
        )
        if text.strip("`") in (target, path) or text.strip("`") in where:
            return where
        return f"{text} {where}" if text.endswith("?") else f"{text}: {where}"

    return _CODE_OR_LINK.sub(replaced, page.read_text(encoding="utf-8"))


def _from_root(path: str) -> str:
    """Returns a path as seen from the project's root, given one as seen from its folder ``docs``."""
    return posixpath.normpath(posixpath.join("docs", path))


def _project_address() -> str:
    """Returns where the project's files are, with a slash at its end; empty if the package was built without an address."""
    try:
        metadata = importlib.metadata.metadata("fabricamp")
    except importlib.metadata.PackageNotFoundError:  # a folder on the path
        return ""
    addresses = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    source = addresses.get("Source")
    return f"{source}/blob/v{metadata['Version']}/" if source else ""


def _mentions(topic: str, pages: Mapping[str, Path]) -> str:
    """Returns the three pages that speak most of ``topic``, for a message; an empty string if none does."""
    texts = {name: page.read_text(encoding="utf-8").lower() for name, page in pages.items()}
    shares = {name: text.count(topic.lower()) / len(text) for name, text in texts.items() if topic.lower() in text}
    most = sorted(shares, key=lambda name: -shares[name])[:3]
    return f"; it is mentioned in {', '.join(most)}" if most and topic else ""


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")
