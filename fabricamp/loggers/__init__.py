"""Loggers: one file each; the packages they need are imported when they first write."""

from __future__ import annotations

from types import ModuleType

from fabricamp.loggers.base import Logger
from fabricamp.loggers.comet import CometLogger
from fabricamp.loggers.csv import CSVLogger
from fabricamp.loggers.json_lines import JSONLinesLogger
from fabricamp.loggers.mlflow import MLFlowLogger
from fabricamp.loggers.tensorboard import TensorBoardLogger
from fabricamp.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "CometLogger", "JSONLinesLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]


def __getattr__(name: str) -> ModuleType:
    from fabricamp.arguments.not_offered import part_of

    return part_of(__name__, name, __all__)
