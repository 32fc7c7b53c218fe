"""Lightning's path to TQDMProgressBar: fabricamp's ProgressBar with the arguments of Lightning's class."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fabricamp._utils.say_once import say_once
from fabricamp.callbacks._renderers import Task
from fabricamp.callbacks.progress.lightnings_bar import LightningsBar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabricamp._utils.types import StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class ShownBar:
    """One of the bars, with tqdm's methods for its description, its values and its total; fabricamp moves it forward."""

    def __init__(self, bar: TQDMProgressBar, *, trains: bool) -> None:
        self._bar = bar
        self._trains = trains

    @property
    def _task(self) -> Task | None:
        """The task that is shown, or the last one that was: its numbers stay."""
        shown = self._bar._train if self._trains else self._bar._evaluation
        return shown or self._bar._ended.get(self._trains)

    @property
    def disable(self) -> bool:
        """Whether the bar is not shown."""
        return self._bar.is_disabled

    @property
    def n(self) -> int:
        """The number of batches that are done."""
        return 0 if self._task is None else self._task.done

    @property
    def total(self) -> int | None:
        """The number of batches; None if it is not known."""
        return None if self._task is None else self._task.total

    @total.setter
    def total(self, total: float | None) -> None:
        if self._task is not None:
            self._task.total = None if total is None else int(total)

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        """Shows ``desc`` in the place of the bar's name, from the next refresh on."""
        if self._task is not None:
            self._task.label = desc or ""

    set_description_str = set_description

    def set_postfix(
        self, ordered_dict: Mapping[str, Any] | None = None, refresh: bool | None = True, **values: Any
    ) -> None:
        """Shows these values beside the metrics, from the next refresh on."""
        self._bar._postfix = {**(ordered_dict or {}), **values}

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Shows this text beside the metrics, from the next refresh on."""
        self._bar._postfix = {"": s} if s else {}

    def write(self, s: str, file: object = None, end: str = "\n", nolock: bool = False) -> None:
        """Prints above the bar."""
        self._bar.print(s, file=file, end=end)

    def update(self, n: float | None = 1) -> None:
        """Does nothing, as the next methods: the bar moves forward, is refreshed and closed by itself."""

    def reset(self, total: float | None = None) -> None:
        """Does nothing."""

    def refresh(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def clear(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class _BarOf:
    """A descriptor for one of the bars; a subclass may assign a bar of its own, which it then has to update itself."""

    def __init__(self, *, trains: bool) -> None:
        self._trains = trains

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, bar: TQDMProgressBar | None, owner: type | None = None) -> Any:
        if bar is None:
            return self
        own_bars = vars(bar).get("_own_bars", {})
        if self._name in own_bars:
            return own_bars[self._name]
        _ = bar.trainer  # raises before the first run
        return ShownBar(bar, trains=self._trains)

    def __set__(self, bar: TQDMProgressBar, own: object) -> None:
        say_once(
            f"{type(bar).__name__} sets {self._name}: only its own methods update that bar; fabricamp shows another one"
        )
        vars(bar).setdefault("_own_bars", {})[self._name] = own


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

    train_progress_bar = _BarOf(trains=True)
    val_progress_bar = _BarOf(trains=False)
    test_progress_bar = _BarOf(trains=False)
    predict_progress_bar = _BarOf(trains=False)

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        self.process_position = process_position
        self._postfix: Mapping[str, Any] = {}
        self._ended: dict[bool, Task] = {}
        """The last task of training (True) and of an evaluation (False) that has ended."""
        super().__init__(refresh_rate, 4.0)

    def get_metrics(self, trainer: Trainer, pl_module: TrainingModule) -> dict[str, Any]:
        """Returns the values shown beside the bar, those of ``set_postfix`` last; override this method to change them."""
        return {**super().get_metrics(trainer, pl_module), **self._postfix}

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), "_own_bars": {}}  # bars do not pickle

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the epoch's line."""
        task = self._train
        super().on_train_epoch_end(trainer, pl_module)
        if task is not None:
            self._ended[True] = task

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Closes the bar and writes its line."""
        self._keep_evaluation()
        super().on_validation_end(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the run's line."""
        self._keep_evaluation()
        super().on_test_end(trainer, pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the run's line."""
        self._keep_evaluation()
        super().on_predict_end(trainer, pl_module)

    def _keep_evaluation(self) -> None:
        """Keeps a task of the last loader, which is done: the shown one was last moved at a refresh."""
        if self._evaluation is not None:
            task = Task(self._evaluation.label)
            total = self._totals[-1] if self._totals else 0
            task.total = int(total) if math.isfinite(total) else None
            task.done = task.total or self._evaluation.done
            self._ended[False] = task
