from fabricamp.state import RunningStage as RunningStage
from fabricamp.state import RunState as TrainerState
from fabricamp.state import TrainerFn as TrainerFn
from fabricamp.state import TrainerStatus as TrainerStatus

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]
