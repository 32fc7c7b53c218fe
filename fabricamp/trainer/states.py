"""Lightning's path to the class of ``trainer.state``, and to the enums in it."""

from fabricamp.state import RunningStage, TrainerFn, TrainerStatus
from fabricamp.state import RunState as TrainerState

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]
