"""``fabricamp help TOPIC``: shows a page of the documentation, which is installed with the package."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fabricamp.errors import ConfigError, nearest
from fabricamp.messages import is_terminal

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("", "how-to/", "guides/")
_NO_TOPICS = ("index", "charts", "changes", "features")
"""Pages of the site that a terminal has no use for: lists of links, pictures."""


def topics() -> dict[str, Path]:
    """Returns the pages by topic, such as "slow-data" or "from-lightning"."""
    installed = _PACKAGE / "pages"
    folder = installed if installed.is_dir() else _PACKAGE.parent / "docs"  # a clone
    files = [file for part in _FOLDERS for file in folder.glob(f"{part}*.md")]
    pages = sorted(files, key=lambda page: page.stem)
    return {page.stem: page for page in pages if page.stem not in _NO_TOPICS}


def show(topic: str | None) -> None:
    """Prints the page on ``topic``, in a pager on a terminal; without a topic all of them, a line each.

    Raises:
        ConfigError: for a topic that there is no page on.
    """
    found = topics()
    if topic is None:
        width = max(map(len, found), default=0)
        for name, page in found.items():
            print(f"{name:{width}}  {_title(page)}")
        return
    topic = Path(topic).stem if topic.endswith(".md") else topic  # as pages name each other
    if topic not in found:
        within = ", ".join(name for name in found if topic.lower() in name)
        meant = f"; did you mean {within}?" if within and topic else nearest(topic, found) or _mentions(topic, found)
        raise ConfigError(f"there is no page on {topic!r}{meant} (`fabricamp help` lists the topics)")
    text = found[topic].read_text(encoding="utf-8")
    if not is_terminal(sys.stdout):
        print(text, end="")
        return
    from rich import get_console
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-R")  # else it shows the codes of colours
    with get_console().pager(styles=True):
        get_console().print(Markdown(text))


def _mentions(topic: str, pages: Mapping[str, Path]) -> str:
    """Returns the three pages that speak most of ``topic``, for a message; an empty string if none does."""
    texts = {name: page.read_text(encoding="utf-8").lower() for name, page in pages.items()}
    shares = {name: text.count(topic.lower()) / len(text) for name, text in texts.items() if topic.lower() in text}
    most = sorted(shares, key=lambda name: -shares[name])[:3]
    return f"; it is mentioned in {', '.join(most)}" if most and topic else ""


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), "")
