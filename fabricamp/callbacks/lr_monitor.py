"""Lightning's path to the LearningRateMonitor."""

from fabricamp.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
