"""Lightning's path to the progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.callbacks.progress_bar import ProgressBar as ProgressBar
from fabricamp.say_once import say_once

if TYPE_CHECKING:
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


def get_standard_metrics(trainer: Trainer) -> dict[str, Any]:
    """Returns what Lightning's bars show without a log: ``v_num``, the logger's version, where there is one."""
    version = None if trainer.logger is None else trainer.logger.version
    if version is None:
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


class LightningsBar(ProgressBar):
    """What Lightning's two bars have in common: subclasses find ``v_num`` among the metrics."""

    drawing: tuple[str, ...] = ()
    """Methods that Lightning's bar draws by, and this one does not."""

    def __init__(self, refresh_rate: int, refresh_rate_hz: float) -> None:
        super().__init__(refresh_rate_hz)
        self.refresh_rate = refresh_rate
        overridden = [name for name in self.drawing if hasattr(type(self), name)]
        if overridden:
            say_once(
                f"{type(self).__name__}.{overridden[0]} is not called: the bar is not drawn by tqdm's or rich's own; "
                "override get_metrics to change the values beside it"
            )
        if refresh_rate == 0:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: TrainingModule) -> dict[str, Any]:
        """Returns the values that stand beside the bar, ``v_num`` first; override it to change them."""
        return {**get_standard_metrics(trainer), **super().get_metrics(trainer, pl_module)}
