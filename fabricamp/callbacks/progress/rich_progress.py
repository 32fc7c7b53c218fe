"""Lightning's path to its RichProgressBar: our bar, with that one's arguments."""

from __future__ import annotations

from typing import Any

from fabricamp.callbacks.progress_bar import ProgressBar

__all__ = ["RichProgressBar", "RichProgressBarTheme"]


class RichProgressBarTheme:
    """The colours of Lightning's bar, kept as attributes; ours has the terminal's own."""

    def __init__(self, **colours: str) -> None:
        self.__dict__.update(colours)


class RichProgressBar(ProgressBar):
    """The progress bar.

    It is drawn by time and not by batches, ``refresh_rate_hz`` times a second at most: ``refresh_rate`` 0 switches it off,
    other values change nothing, nor do ``leave``, ``theme`` and ``console_kwargs``.

    >>> bar = RichProgressBar(leave=True)
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
        *,
        refresh_rate_hz: float = 4.0,
    ) -> None:
        super().__init__(refresh_rate_hz)
        if refresh_rate == 0:
            self.disable()
