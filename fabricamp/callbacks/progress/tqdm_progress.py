"""Lightning's path to TQDMProgressBar: fabricamp's ProgressBar with the arguments of Lightning's class."""

from __future__ import annotations

from fabricamp.callbacks.progress.progress_bar import LightningsBar


class TQDMProgressBar(LightningsBar):
    """:class:`ProgressBar` under Lightning's name.  The bar is refreshed by time, not by batches.

    Args:
        refresh_rate: 0 switches the bar off; other values change nothing.
        process_position: changes nothing.
        leave: changes nothing: every epoch leaves its line.

    Example:
        >>> bar = TQDMProgressBar(refresh_rate=20)
    """

    drawing = ("init_sanity_tqdm", "init_train_tqdm", "init_validation_tqdm", "init_test_tqdm", "init_predict_tqdm")

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, 4.0)
