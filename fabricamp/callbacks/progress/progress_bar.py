"""Lightning's path to the progress bar."""

from fabricamp.callbacks.progress_bar import ProgressBar

__all__ = ["ProgressBar"]
