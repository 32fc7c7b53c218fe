"""Draws progress bars: on a terminal through rich, in a notebook as an output that is replaced, elsewhere as plain lines."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
from io import StringIO
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from fabricamp.messages import is_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from IPython.display import DisplayHandle
    from rich.text import Text

_LOG = logging.getLogger("fabricamp")

Pairs = list[tuple[str, str]]
"""The (name, value) pairs of a line; either may be empty."""

_PACE_SECONDS = 10.0
"""The shown speed is an average over about this number of last seconds."""

_PLAIN_SECONDS = 10.0
_SHARE_OF_TIME = 0.01
"""The largest fraction of the time that drawing may take."""

_LABEL_WIDTH = 12
_BAR_LEAST = 10
_BAR_MOST = 40
_GAP = "  "
_HTML = '<pre style="margin:0;line-height:normal;white-space:pre-wrap">{code}</pre>'


class Task:
    """One bar: its position, and its speed while it is not waiting for another bar."""

    __slots__ = ("_first", "_mark", "_paced", "_paced_seconds", "_seconds", "done", "label", "started", "total")

    def __init__(self, label: str, done: int = 0) -> None:
        self.label = label
        self.total: int | None = None
        self.done = done
        self.started = monotonic()
        self._first = done
        self._mark = self.started
        self._seconds = 0.0
        # Batches and seconds of the last while: older ones fade away.
        self._paced = 0.0
        self._paced_seconds = 0.0

    def advance(self, done: int) -> None:
        """Moves the position to ``done``."""
        now = monotonic()
        seconds = now - self._mark
        fading = math.exp(-seconds / _PACE_SECONDS)
        self._paced = self._paced * fading + done - self.done
        self._paced_seconds = self._paced_seconds * fading + seconds
        self._seconds += seconds
        self._mark = now
        self.done = done

    def resume(self) -> None:
        """Excludes the time since the last :meth:`advance` from the speed: another bar ran meanwhile."""
        self._mark = monotonic()

    @property
    def pace(self) -> str:
        """The speed over the last seconds; empty if unknown."""
        return _pace(self._paced, self._paced_seconds)

    @property
    def mean_pace(self) -> str:
        """The mean speed since the bar began; empty if unknown."""
        return _pace(self.done - self._first, self._seconds)

    @property
    def position(self) -> str:
        """The position as ``"120/450"``, or ``"120"`` if the total is unknown."""
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"

    @property
    def time_left(self) -> str:
        """The remaining time as ``"0:13 left"``; empty if unknown."""
        if self.total is None or not self._paced:
            return ""
        return f"{clock(max(self.total - self.done, 0) * self._paced_seconds / self._paced)} left"


def _pace(batches: float, seconds: float) -> str:
    if batches <= 0 or seconds <= 0:
        return ""
    rate = batches / seconds
    if rate < 1:
        return f"{1 / rate:.1f} s/it"
    return f"{rate:.0f} it/s" if rate >= 100 else f"{rate:.1f} it/s"


def clock(seconds: float) -> str:
    """Formats ``seconds`` as ``"0:13"`` or ``"1:02:03"``."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02}:{seconds_left:02}" if hours else f"{minutes_left}:{seconds_left:02}"


def duration(seconds: float) -> str:
    """Formats ``seconds`` as ``"4.2 s"``, or ``"1:02"`` from a minute on."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


class Renderer:
    """Writes plain lines through logger ``fabricamp``, for files, pipes and logs."""

    is_live = False

    def __init__(self) -> None:
        self.interval = _PLAIN_SECONDS
        """Seconds between two refreshes."""

    def draw(self, tasks: Sequence[Task], metrics: Pairs) -> None:
        """Shows the positions of ``tasks``, the innermost last."""
        task = tasks[-1]
        shown_metrics = metrics if len(tasks) == 1 else []
        self.write([(task.label, ""), ("", task.position), *shown_metrics, ("", task.pace)])

    def write(self, pairs: Pairs) -> None:
        """Writes a permanent line."""
        line = _GAP.join(text for name, value in pairs if (text := f"{name} {value}".strip()))
        _LOG.info(line)

    def close(self, *, keep: bool) -> None:
        """Releases the terminal; with ``keep`` the last rendered lines stay."""


class _LiveRenderer(Renderer):
    """Draws bars that move; where they are shown is up to the two subclasses."""

    is_live = True

    def __init__(self, interval: float) -> None:
        from rich import get_console

        super().__init__()
        self.interval = interval
        self._shortest = interval
        # rich's global console, so the user's own output through rich also appears above the bar.
        self._console = get_console()
        self._metrics_below = False

    def draw(self, tasks: Sequence[Task], metrics: Pairs) -> None:
        started = monotonic()
        self._show(self._picture(tasks, metrics))
        self.interval = max(self._shortest, (monotonic() - started) / _SHARE_OF_TIME)

    def _show(self, picture: Text) -> None:
        """Replaces the bars by ``picture``."""
        raise NotImplementedError

    def _picture(self, tasks: Sequence[Task], metrics: Pairs) -> Text:
        """Returns one line per task; the metrics end the first line until they do not fit, and are below from then on."""
        from rich.text import Text

        heads = [task.label.ljust(_LABEL_WIDTH) + _GAP for task in tasks]
        tails = [_GAP.join(filter(None, (task.position, task.pace, task.time_left))) for task in tasks]
        # The last column stays free: terminals differ in what they do after it.
        width = self._console.width - 1
        room = width - max(len(head + _GAP + tail) for head, tail in zip(heads, tails, strict=True))
        room_beside_metrics = room - sum(len(name) + len(value) + 1 + len(_GAP) for name, value in metrics)
        self._metrics_below = self._metrics_below or room_beside_metrics < _BAR_LEAST
        bar_width = min(_BAR_MOST, room if self._metrics_below else room_beside_metrics)
        lines = [
            Text.assemble((head, "bold"), self._bar(task, bar_width), tail)
            for task, head, tail in zip(tasks, heads, tails, strict=True)
        ]
        if self._metrics_below:
            lines += _wrapped(metrics, width)
        elif metrics:
            lines[0].append(_GAP).append_text(_spaced(metrics))
        return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)

    def _bar(self, task: Task, width: int) -> Text:
        from rich.text import Text

        if not task.total or width < _BAR_LEAST:
            return Text()
        colourless = self._console.no_color or self._console.color_system is None
        filled, unfilled = "#-" if self._console.options.ascii_only else "━━"
        length = min(width * task.done // task.total, width)
        finished = "bar.finished" if task.done >= task.total else "bar.complete"
        if colourless:  # both parts would look the same
            unfilled = " "
        return Text.assemble((filled * length, finished), (unfilled * (width - length), "bar.back"), _GAP)


class TerminalRenderer(_LiveRenderer):
    """Redraws lines in place through rich; other output appears above them."""

    def __init__(self, interval: float) -> None:
        from rich.live import Live

        super().__init__(interval)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=True,
            redirect_stderr=is_terminal(sys.stderr),
        )
        streams = sys.stdout, sys.stderr
        self._live.start()
        # The cursor stays visible, because a killed process could not show it again.
        self._console.show_cursor(show=True)
        self._moved = list(_move_log_handlers(*streams))

    def _show(self, picture: Text) -> None:
        from rich.console import Group
        from rich.control import Control
        from rich.segment import ControlType

        # The terminal echoes ^C at the cursor.  After a line of full width the echo would begin a new line, and the next refresh
        # would not erase the current lines.  At the beginning of the line the next refresh overwrites the echo.
        to_the_beginning = Control(ControlType.CARRIAGE_RETURN)
        self._live.update(Group(picture, to_the_beginning), refresh=True)

    def write(self, pairs: Pairs) -> None:
        self._console.print(_permanent(pairs, self._console.width), soft_wrap=True)

    def close(self, *, keep: bool) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._live.transient = not keep
        self._live.stop()


class NotebookRenderer(_LiveRenderer):
    """Shows the bars as one output of the cell, and replaces it with each refresh.

    A permanent line takes the place of the bars, and the next refresh opens an output below: lines and what the cell prints stay in
    their order, and a saved notebook has one output per line.
    """

    def __init__(self, interval: float) -> None:
        super().__init__(interval)
        self._output: DisplayHandle | None = None

    def _show(self, picture: Text) -> None:
        from IPython.display import DisplayHandle

        content = _as_html_and_text(picture, self._console.width)
        if self._output is None:
            self._output = DisplayHandle()
            self._output.display(content, raw=True)
        else:
            self._output.update(content, raw=True)

    def write(self, pairs: Pairs) -> None:
        self._show(_permanent(pairs, self._console.width))
        self._output = None

    def close(self, *, keep: bool) -> None:
        if self._output is not None and not keep:
            self._output.update({"text/plain": ""}, raw=True)
        self._output = None


def _permanent(pairs: Pairs, width: int) -> Text:
    """Returns the line that stays, broken between pairs where it is wider than ``width``."""
    from rich.text import Text

    return Text("\n" + _GAP).join(_wrapped(pairs, width - len(_GAP)))


def _as_html_and_text(picture: Text, width: int) -> dict[str, str]:
    """Returns ``picture`` by MIME type: a front end shows the HTML, and a terminal or a viewer without HTML the text."""
    from rich.console import Console

    # No terminal and no notebook: rich would print into the cell.
    console = Console(record=True, file=StringIO(), width=width, color_system="truecolor", force_jupyter=False)
    console.print(picture, soft_wrap=True)
    html = console.export_html(inline_styles=True, code_format=_HTML)
    return {"text/html": html, "text/plain": picture.plain}


def _spaced(pairs: Pairs) -> Text:
    from rich.text import Text

    texts = []
    for name, value in pairs:
        if name or value:
            label = f"{name} " if name and value else name
            texts.append(Text.assemble((label, "dim" if value else "bold"), value))
    return Text(_GAP).join(texts)


def _wrapped(pairs: Pairs, width: int) -> Iterator[Text]:
    """Yields lines of complete pairs, none wider than ``width`` unless a single pair is."""
    line: Pairs = []
    for pair in pairs:
        if not any(pair):
            continue
        if line and len(_GAP) + _spaced([*line, pair]).cell_len > width:
            yield _spaced(line)
            line = []
        line.append(pair)
    if line:
        yield _spaced(line)


def _move_log_handlers(*before: TextIO) -> Iterator[tuple[logging.StreamHandler[TextIO], TextIO]]:
    """Redirects log handlers of the original stdout and stderr to rich's replacements; yields (handler, old stream)."""
    others = logging.root.manager.loggerDict.values()  # also placeholders for names without a logger
    loggers = [logging.root, *(logger for logger in others if isinstance(logger, logging.Logger))]
    for handler in dict.fromkeys(handler for logger in loggers for handler in logger.handlers):
        if not isinstance(handler, logging.StreamHandler):
            continue
        for stream, replacement in zip(before, (sys.stdout, sys.stderr), strict=True):
            if handler.stream is stream and replacement is not stream:
                handler.setStream(replacement)
                yield handler, stream


def open_renderer(interval: float) -> Renderer:
    """Returns the screen for the current stdout; a live one refreshes at most every ``interval`` seconds."""
    from rich import get_console

    if get_console().is_jupyter:
        # A notebook drops what a worker process displays.
        return NotebookRenderer(interval) if multiprocessing.parent_process() is None else Renderer()
    in_terminal = is_terminal(sys.stdout) and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}
    return TerminalRenderer(interval) if in_terminal else Renderer()
