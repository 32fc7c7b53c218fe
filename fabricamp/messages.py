"""Logger ``fabricamp``, through which everything is said: to whom logging leads, else in plain lines on stderr."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap


class _Logger(logging.Logger):
    """A logger that shows information too, as long as nobody has set a level."""

    def getEffectiveLevel(self) -> int:  # noqa: N802 - logging's name
        if self.level != logging.NOTSET:
            return self.level
        # The root's level is WARNING where nobody has set it; any other one is somebody's wish.
        return logging.INFO if logging.root.level == logging.WARNING else logging.root.level


class _PlainLines(logging.Handler):
    """Writes plain lines to stderr, as long as neither the root logger nor this one has a handler of somebody else's."""

    def emit(self, record: logging.LogRecord) -> None:
        # Asked for each record: programs configure logging before and after this import, and between two fits.
        configured = bool(logging.root.handlers) or any(one is not self for one in LOGGER.handlers)
        if configured or sys.stderr is None:
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass  # the terminal, or the reader of the pipe, is gone, or the stream is closed: no reason for a run to fail
        except Exception:  # noqa: BLE001 - as in logging's own handlers: a wrong message does not end a program
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno > logging.INFO:
            text = f"fabricamp: {text}"
        if not sys.stderr.isatty():
            return text
        width = max(shutil.get_terminal_size().columns, 20)
        return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.splitlines())


def _broken(line: str, width: int) -> str:
    """The line broken between words."""
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def on_screen() -> bool:
    """Returns whether stdout leads to a terminal or a notebook, where tables and bars are drawn."""
    from rich import get_console

    return sys.stdout.isatty() or get_console().is_jupyter


def level() -> int:
    """Returns the least level of what is shown: for processes that do not inherit it."""
    return max(LOGGER.getEffectiveLevel(), LOGGER.manager.disable + 1)


LOGGER = logging.getLogger("fabricamp")
# In place: a program may have asked logging for it before this import, and have set its level.
LOGGER.__class__ = _Logger
LOGGER.addHandler(_PlainLines())
