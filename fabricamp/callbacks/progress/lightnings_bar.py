"""The base of Lightning's two progress bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp._utils.say_once import say_once
from fabricamp.callbacks.progress_bar import ProgressBar

if TYPE_CHECKING:
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


def get_standard_metrics(trainer: Trainer) -> dict[str, Any]:
    """Returns the values that Lightning's bars show by themselves: ``v_num``, the logger's version, if there is one."""
    version = None if trainer.logger is None else trainer.logger.version
    if version is None:
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


class LightningsBar(ProgressBar):
    """Base of Lightning's two bars; adds ``v_num`` to the metrics."""

    drawing: tuple[str, ...] = ()
    """Drawing methods of Lightning's bar; this bar does not call them."""

    def __init__(self, refresh_rate: int, refresh_rate_hz: float) -> None:
        super().__init__(refresh_rate_hz)
        self._refresh_rate = refresh_rate
        overridden = [name for name in self.drawing if hasattr(type(self), name)]
        if overridden:
            say_once(
                f"{type(self).__name__}.{overridden[0]} is not called: neither tqdm nor rich draws the bar; "
                "override get_metrics to change the values beside it"
            )

    @property
    def is_enabled(self) -> bool:
        """Whether bars are shown: never with ``refresh_rate=0``."""
        return self._enabled and self.refresh_rate > 0

    @is_enabled.setter
    def is_enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    @property
    def refresh_rate(self) -> int:  # a subclass may override it by a property too
        """The number of batches between two refreshes that was given; 0 shows no bar."""
        return self._refresh_rate

    @refresh_rate.setter
    def refresh_rate(self, refresh_rate: int) -> None:
        self._refresh_rate = refresh_rate

    def get_metrics(self, trainer: Trainer, pl_module: TrainingModule) -> dict[str, Any]:
        """Returns the values shown beside the bar, ``v_num`` first; override this method to change them."""
        return {**get_standard_metrics(trainer), **super().get_metrics(trainer, pl_module)}
