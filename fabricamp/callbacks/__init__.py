"""Callbacks: one file each, imported when their name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricamp.callbacks.amp_state import AmpState as AmpState
    from fabricamp.callbacks.async_checkpoint import AsyncCheckpoint as AsyncCheckpoint
    from fabricamp.callbacks.base import CALLBACKS as CALLBACKS
    from fabricamp.callbacks.base import Callback as Callback
    from fabricamp.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from fabricamp.callbacks.checkpoint import Checkpoint as Checkpoint
    from fabricamp.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from fabricamp.callbacks.divergence_check import DivergenceCheck as DivergenceCheck
    from fabricamp.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from fabricamp.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from fabricamp.callbacks.ema import EMA as EMA
    from fabricamp.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from fabricamp.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from fabricamp.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from fabricamp.callbacks.gradient_monitor import GradientMonitor as GradientMonitor
    from fabricamp.callbacks.lambda_function import LambdaCallback as LambdaCallback
    from fabricamp.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from fabricamp.callbacks.lr_finder import LearningRateFinder as LearningRateFinder
    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from fabricamp.callbacks.model_summary import ModelSummary as ModelSummary
    from fabricamp.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from fabricamp.callbacks.optuna_pruning import OptunaPruning as OptunaPruning
    from fabricamp.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from fabricamp.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
    from fabricamp.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
    from fabricamp.callbacks.progress_bar import ProgressBar as ProgressBar
    from fabricamp.callbacks.stochastic_weight_avg import StochasticWeightAveraging as StochasticWeightAveraging
    from fabricamp.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from fabricamp.callbacks.timer import Timer as Timer
    from fabricamp.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from fabricamp.callbacks.weight_averaging import WeightAveraging as WeightAveraging

    RichModelSummary = ModelSummary

_FILES = {
    "AmpState": "amp_state",
    "AsyncCheckpoint": "async_checkpoint",
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "CALLBACKS": "base",
    "Callback": "base",
    "Checkpoint": "checkpoint",
    "DeviceStatsMonitor": "device_stats_monitor",
    "DivergenceCheck": "divergence_check",
    "EMA": "ema",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation_scheduler",
    "GradientMonitor": "gradient_monitor",
    "LambdaCallback": "lambda_function",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "learning_rate_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "OptunaPruning": "optuna_pruning",
    "ProgressBar": "progress_bar",
    "RichModelSummary": "model_summary:ModelSummary",
    "RichProgressBar": "progress.rich_progress",
    "StochasticWeightAveraging": "stochastic_weight_avg",
    "TQDMProgressBar": "progress.tqdm_progress",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}

__all__ = list(_FILES)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        from fabricamp.arguments.not_offered import part_of

        return part_of(__name__, name, _FILES)
    file, _, name_there = _FILES[name].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{file}"), name_there or name)


def __dir__() -> list[str]:
    return __all__
