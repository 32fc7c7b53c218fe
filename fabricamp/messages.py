"""The logger ``fabricamp``, used for all messages: it prints plain lines to stderr unless the program configures logging."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
from typing import TextIO


class _InformingLogger(logging.Logger):
    """A logger whose default level is INFO, as long as nobody has set a level."""

    def getEffectiveLevel(self) -> int:  # noqa: N802 - logging's name
        if self.level != logging.NOTSET:
            return self.level
        # WARNING is the root's default level; any other level was set on purpose.
        return logging.INFO if logging.root.level == logging.WARNING else logging.root.level


class _PlainLines(logging.Handler):
    """Writes plain lines to stderr, as long as neither the root logger nor ``fabricamp`` has another handler."""

    def emit(self, record: logging.LogRecord) -> None:
        # Checked for each record: programs configure logging before or after this import, or between two fits.
        configured = bool(logging.root.handlers) or any(one is not self for one in LOGGER.handlers)
        if configured or sys.stderr is None:
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            pass  # a closed stream, or a terminal or pipe reader that is gone, is no reason for a run to fail
        except Exception:  # noqa: BLE001 - as in logging's own handlers: a message that cannot be formatted does not end a program
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno > logging.INFO:
            text = f"fabricamp: {text}"
        if not is_terminal(sys.stderr):
            return text
        width = max(shutil.get_terminal_size().columns, 20)
        return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.splitlines())


def _broken(line: str, width: int) -> str:
    """Returns the line, wrapped between words."""
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def printable(text: str) -> str:
    r"""Returns ``text`` with control characters and line breaks as escapes, so that a terminal shows them and does nothing else.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether ``stream`` is a terminal; a service has none at all, and a program's own object may not know."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # no such method, or closed
        return False


def on_screen() -> bool:
    """Returns whether stdout is a terminal or a notebook, which can show tables and bars."""
    from rich import get_console

    return is_terminal(sys.stdout) or get_console().is_jupyter


def level() -> int:
    """Returns the lowest level that is shown, to pass to processes that do not inherit it."""
    return max(LOGGER.getEffectiveLevel(), LOGGER.manager.disable + 1)


LOGGER = logging.getLogger("fabricamp")
# The class is changed in place: a program may have got the logger before this import, and have set its level.  It may also have
# given logging a class of its own (logging.setLoggerClass), which makes records that its formatters need.
LOGGER.__class__ = type("_Logger", (_InformingLogger, type(LOGGER)), {})
LOGGER.addHandler(_PlainLines())
