"""Lightning's path to the progress bar."""

from __future__ import annotations

from fabricamp.callbacks.progress_bar import ProgressBar

__all__ = ["ProgressBar"]
