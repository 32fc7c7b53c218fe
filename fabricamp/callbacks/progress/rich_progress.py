"""Lightning's path to RichProgressBar: fabricamp's ProgressBar with that one's arguments."""

from __future__ import annotations

from typing import Any

from fabricamp.callbacks.progress.progress_bar import LightningsBar


class RichProgressBarTheme:
    """The colours of Lightning's bar, kept as attributes; fabricamp's bar has the terminal's own."""

    def __init__(self, **colours: str) -> None:
        self.__dict__.update(colours)


class RichProgressBar(LightningsBar):
    """:class:`ProgressBar` by Lightning's name.  It is drawn by time and not by batches.

    Args:
        refresh_rate: 0 switches it off; other values change nothing.
        leave: changes nothing: every epoch leaves its line.
        theme: changes nothing.
        console_kwargs: changes nothing.
        refresh_rate_hz: how many times per second it is drawn at most.

    Example:
        >>> bar = RichProgressBar(leave=True)
    """

    drawing = ("configure_columns",)

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
        *,
        refresh_rate_hz: float = 4.0,
    ) -> None:
        super().__init__(refresh_rate, refresh_rate_hz)
