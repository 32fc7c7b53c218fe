"""Lightning's path to progress bars."""

from fabricamp.callbacks.progress.rich_progress import RichProgressBar
from fabricamp.callbacks.progress.tqdm_progress import TQDMProgressBar
from fabricamp.callbacks.progress_bar import ProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "TQDMProgressBar"]
