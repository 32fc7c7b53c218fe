"""Lightning's path to progress bars."""

from types import ModuleType

from fabricamp.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
from fabricamp.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
from fabricamp.callbacks.progress_bar import ProgressBar as ProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "TQDMProgressBar"]


def __getattr__(name: str) -> ModuleType:
    from fabricamp.arguments.not_offered import part_of

    return part_of(__name__, name, __all__)
