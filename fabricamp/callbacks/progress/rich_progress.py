"""Lightning's path to RichProgressBar: fabricamp's ProgressBar with the arguments of Lightning's class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fabricamp.callbacks.progress.lightnings_bar import LightningsBar


@dataclass
class RichProgressBarTheme:
    """Keeps the colours of Lightning's bar as attributes; fabricamp's bar uses the terminal's own colours."""

    description: Any = ""
    progress_bar: Any = "#6206E0"
    progress_bar_finished: Any = "#6206E0"
    progress_bar_pulse: Any = "#6206E0"
    batch_progress: Any = ""
    time: Any = "dim"
    processing_speed: Any = "dim underline"
    metrics: Any = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(LightningsBar):
    """:class:`ProgressBar` under Lightning's name.  The bar is refreshed by time, not by batches.

    Args:
        refresh_rate: 0 switches the bar off; other values change nothing.
        leave: changes nothing: every epoch leaves its line.
        theme: is kept as an attribute, and changes nothing.
        console_kwargs: changes nothing.
        refresh_rate_hz: the largest number of refreshes per second.

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
        self.theme = RichProgressBarTheme() if theme is None else theme
