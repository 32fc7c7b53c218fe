"""Where a progress bar is drawn: a terminal or a notebook through rich, or plain lines."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from lightning_utilities.core.imports import package_available

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.text import Text

_LOG = logging.getLogger("fabricamp")

Pairs = list[tuple[str, str]]
"""What a line says: names and values, either of which may be empty."""

_PACE_SECONDS = 10.0
"""The speed shown is that of about so many last seconds."""

_PLAIN_SECONDS = 10.0
_SHARE_OF_TIME = 0.01
"""What drawing may take."""

_LABEL_WIDTH = 12
_BAR_LEAST, _BAR_MOST = 10, 40
_GAP = "  "


class Track:
    """One bar: where it stands, and how fast it goes while it is not waiting for another one."""

    __slots__ = ("_first", "_mark", "_paced", "_paced_seconds", "_seconds", "done", "label", "started", "total")

    def __init__(self, label: str, done: int = 0) -> None:
        self.label = label
        self.total: int | None = None
        self.done = self._first = done
        self.started = self._mark = monotonic()
        self._seconds = 0.0
        self._paced = self._paced_seconds = 0.0

    def advance(self, done: int) -> None:
        """Stands at ``done`` now."""
        now = monotonic()
        seconds = now - self._mark
        fading = math.exp(-seconds / _PACE_SECONDS)
        self._paced = self._paced * fading + done - self.done
        self._paced_seconds = self._paced_seconds * fading + seconds
        self._seconds += seconds
        self._mark, self.done = now, done

    def resume(self) -> None:
        """Leaves out the time since the last :meth:`advance`: it was another's."""
        self._mark = monotonic()

    @property
    def pace(self) -> str:
        """The speed of the last seconds, or nothing."""
        return _pace(self._paced, self._paced_seconds)

    @property
    def mean_pace(self) -> str:
        """The speed since it began, or nothing."""
        return _pace(self.done - self._first, self._seconds)

    @property
    def position(self) -> str:
        """Like ``"120/450"``; ``"120"`` where the end is not known."""
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"

    @property
    def time_left(self) -> str:
        """Like ``"0:13 left"``, or nothing."""
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
    """Returns ``"0:13"`` or ``"1:02:03"``."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02}:{seconds_left:02}" if hours else f"{minutes_left}:{seconds_left:02}"


def duration(seconds: float) -> str:
    """Returns ``"4.2 s"``, or from a minute on ``"1:02"``."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


class Screen:
    """Plain lines through logger ``fabricamp``, for files, pipes and logs."""

    is_live = False

    def __init__(self) -> None:
        self.interval = _PLAIN_SECONDS
        """Seconds to wait between two pictures."""

    def draw(self, tracks: Sequence[Track], metrics: Pairs) -> None:
        """Shows where ``tracks`` stand, the innermost last."""
        track = tracks[-1]
        self.write([(track.label, ""), ("", track.position), *(metrics if len(tracks) == 1 else []), ("", track.pace)])

    def write(self, pairs: Pairs) -> None:
        """Writes a line that stays."""
        line = _GAP.join(text for name, value in pairs if (text := f"{name} {value}".strip()))
        _LOG.info(line)

    def close(self, *, keep: bool) -> None:
        """Gives the terminal back; with ``keep`` the last picture stays."""


class _LiveScreen(Screen):
    """A picture that is drawn over, through rich; what others print lands above it."""

    is_live = True

    def __init__(self, interval: float) -> None:
        from rich import get_console
        from rich.live import Live

        super().__init__()
        self.interval = self._shortest = interval
        # rich's own console, so that what the user prints through rich lands above the bar too.
        self._console = get_console()
        self._metrics_below = False
        in_terminal = not self._console.is_jupyter
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=in_terminal,
            redirect_stderr=in_terminal and sys.stderr.isatty(),
        )
        streams = sys.stdout, sys.stderr
        self._live.start()
        # A process that is killed could not show a hidden cursor again.
        self._console.show_cursor(show=True)
        self._moved = list(_move_log_handlers(*streams))

    def draw(self, tracks: Sequence[Track], metrics: Pairs) -> None:
        from rich.console import Group
        from rich.control import Control
        from rich.segment import ControlType

        started = monotonic()
        # The terminal echoes ^C where the cursor stands.  Behind a line of the full width the echo would begin a new line, and the
        # next picture would leave this one standing; at the line's beginning it is drawn over.
        to_the_beginning = Control(ControlType.CARRIAGE_RETURN)
        self._live.update(Group(self._picture(tracks, metrics), to_the_beginning), refresh=True)
        self.interval = max(self._shortest, (monotonic() - started) / _SHARE_OF_TIME)

    def write(self, pairs: Pairs) -> None:
        from rich.text import Text

        lines = _wrapped(pairs, self._console.width - len(_GAP))
        self._console.print(Text("\n" + _GAP).join(lines), soft_wrap=True)

    def close(self, *, keep: bool) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._live.transient = not keep
        self._live.stop()

    def _picture(self, tracks: Sequence[Track], metrics: Pairs) -> Text:
        """A line a track; the metrics end the first one while they fit there, from then on they stand below."""
        from rich.text import Text

        heads = [track.label.ljust(_LABEL_WIDTH) + _GAP for track in tracks]
        tails = [_GAP.join(filter(None, (track.position, track.pace, track.time_left))) for track in tracks]
        # The last column stays free: terminals differ in what they do after it.
        width = self._console.width - 1
        room = width - max(len(head + _GAP + tail) for head, tail in zip(heads, tails, strict=True))
        beside = sum(len(name) + len(value) + 1 + len(_GAP) for name, value in metrics)
        self._metrics_below = self._metrics_below or room - beside < _BAR_LEAST
        bar_width = min(_BAR_MOST, room if self._metrics_below else room - beside)
        lines = [
            Text.assemble((head, "bold"), self._bar(track, bar_width), tail)
            for track, head, tail in zip(tracks, heads, tails, strict=True)
        ]
        if self._metrics_below:
            lines += _wrapped(metrics, width)
        elif metrics:
            lines[0].append(_GAP).append_text(_spaced(metrics))
        return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)

    def _bar(self, track: Track, width: int) -> Text:
        from rich.text import Text

        if not track.total or width < _BAR_LEAST:
            return Text()
        colourless = self._console.no_color or self._console.color_system is None
        filled, unfilled = "#-" if self._console.options.ascii_only else "━━"
        length = min(width * track.done // track.total, width)
        finished = "bar.finished" if track.done >= track.total else "bar.complete"
        rest = " " if colourless else unfilled
        return Text.assemble((filled * length, finished), (rest * (width - length), "bar.back"), _GAP)


def _spaced(pairs: Pairs) -> Text:
    from rich.text import Text

    shown = [(name, value) for name, value in pairs if name or value]
    return Text(_GAP).join(
        Text.assemble((f"{name} " if name and value else name, "dim" if value else "bold"), value)
        for name, value in shown
    )


def _wrapped(pairs: Pairs, width: int) -> Iterator[Text]:
    """Lines of whole pairs, none wider than ``width`` where a pair is not."""
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
    """Points log handlers that write to the bare stdout and stderr at their stand-ins; yields the moved ones."""
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    for handler in dict.fromkeys(handler for one in loggers for handler in one.handlers):
        if not isinstance(handler, logging.StreamHandler):
            continue
        for stream, stand_in in zip(before, (sys.stdout, sys.stderr), strict=True):
            if handler.stream is stream and stand_in is not stream:
                handler.setStream(stand_in)
                yield handler, stream


def open_screen(interval: float) -> Screen:
    """Returns the screen for where stdout leads; a live one draws every ``interval`` seconds at most."""
    from rich import get_console

    if get_console().is_jupyter:
        # rich draws in notebooks through ipywidgets, and a widget cannot be reached from a worker process.
        live = package_available("ipywidgets") and multiprocessing.parent_process() is None
    else:
        live = sys.stdout.isatty() and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}
    return _LiveScreen(interval) if live else Screen()
