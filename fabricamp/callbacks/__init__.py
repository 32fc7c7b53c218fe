"""Callbacks: one file each, imported when their name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricamp.callbacks.amp_state import AmpState
    from fabricamp.callbacks.async_checkpoint import AsyncCheckpoint
    from fabricamp.callbacks.base import CALLBACKS, Callback
    from fabricamp.callbacks.divergence_check import DivergenceCheck
    from fabricamp.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
    from fabricamp.callbacks.learning_rate_monitor import LearningRateMonitor
    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.callbacks.model_summary import ModelSummary
    from fabricamp.callbacks.progress_bar import ProgressBar, RichProgressBar

__all__ = [
    "CALLBACKS",
    "AmpState",
    "AsyncCheckpoint",
    "Callback",
    "DivergenceCheck",
    "EarlyStopping",
    "EarlyStoppingReason",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "RichProgressBar",
]

_FILES = {
    "AmpState": "amp_state",
    "AsyncCheckpoint": "async_checkpoint",
    "CALLBACKS": "base",
    "Callback": "base",
    "DivergenceCheck": "divergence_check",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "LearningRateMonitor": "learning_rate_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "ProgressBar": "progress_bar",
    "RichProgressBar": "progress_bar",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
