"""Callbacks: one file each, imported when their name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricamp.callbacks.amp_state import AmpState
    from fabricamp.callbacks.async_checkpoint import AsyncCheckpoint
    from fabricamp.callbacks.base import CALLBACKS, Callback
    from fabricamp.callbacks.batch_size_finder import BatchSizeFinder
    from fabricamp.callbacks.device_stats_monitor import DeviceStatsMonitor
    from fabricamp.callbacks.divergence_check import DivergenceCheck
    from fabricamp.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
    from fabricamp.callbacks.ema import EMA
    from fabricamp.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
    from fabricamp.callbacks.lambda_function import LambdaCallback
    from fabricamp.callbacks.learning_rate_monitor import LearningRateMonitor
    from fabricamp.callbacks.lr_finder import LearningRateFinder
    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.callbacks.model_summary import ModelSummary
    from fabricamp.callbacks.prediction_writer import BasePredictionWriter
    from fabricamp.callbacks.progress.rich_progress import RichProgressBar
    from fabricamp.callbacks.progress.tqdm_progress import TQDMProgressBar
    from fabricamp.callbacks.progress_bar import ProgressBar
    from fabricamp.callbacks.rich_model_summary import RichModelSummary
    from fabricamp.callbacks.stochastic_weight_avg import StochasticWeightAveraging
    from fabricamp.callbacks.timer import Timer
    from fabricamp.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "CALLBACKS",
    "EMA",
    "AmpState",
    "AsyncCheckpoint",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "DeviceStatsMonitor",
    "DivergenceCheck",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EarlyStoppingReason",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Timer",
    "WeightAveraging",
]

_FILES = {
    "AmpState": "amp_state",
    "AsyncCheckpoint": "async_checkpoint",
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "CALLBACKS": "base",
    "Callback": "base",
    "DeviceStatsMonitor": "device_stats_monitor",
    "DivergenceCheck": "divergence_check",
    "EMA": "ema",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "LambdaCallback": "lambda_function",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "learning_rate_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "ProgressBar": "progress_bar",
    "RichModelSummary": "rich_model_summary",
    "RichProgressBar": "progress.rich_progress",
    "StochasticWeightAveraging": "stochastic_weight_avg",
    "TQDMProgressBar": "progress.tqdm_progress",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        from fabricamp.not_offered import missing

        raise missing(__name__, name, _FILES)
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
