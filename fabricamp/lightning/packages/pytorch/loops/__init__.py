# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.loops``."""

from fabricamp.lightning.packages.pytorch.loops.evaluation_loop import _EvaluationLoop as _EvaluationLoop
from fabricamp.lightning.packages.pytorch.loops.fit_loop import _FitLoop as _FitLoop
from fabricamp.lightning.packages.pytorch.loops.loop import _Loop as _Loop
from fabricamp.lightning.packages.pytorch.loops.optimization import _AutomaticOptimization as _AutomaticOptimization
from fabricamp.lightning.packages.pytorch.loops.optimization import _ManualOptimization as _ManualOptimization
from fabricamp.lightning.packages.pytorch.loops.prediction_loop import _PredictionLoop as _PredictionLoop
from fabricamp.lightning.packages.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as _TrainingEpochLoop

__all__ = [
    "_AutomaticOptimization",
    "_EvaluationLoop",
    "_FitLoop",
    "_Loop",
    "_ManualOptimization",
    "_PredictionLoop",
    "_TrainingEpochLoop",
]
