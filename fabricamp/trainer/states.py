"""Lightning's path to what ``trainer.state`` is and holds."""

from fabricamp.state import RunningStage, TrainerFn, TrainerStatus
from fabricamp.state import RunState as TrainerState

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]
