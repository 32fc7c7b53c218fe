"""Loggers: one file each; what they need is imported when they first write."""

from __future__ import annotations

from fabricamp.loggers.base import Logger
from fabricamp.loggers.csv import CSVLogger
from fabricamp.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
