"""Lightning's path to the LearningRateMonitor."""

from __future__ import annotations

from fabricamp.callbacks.learning_rate_monitor import LearningRateMonitor

__all__ = ["LearningRateMonitor"]
