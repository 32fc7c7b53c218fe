# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.loggers``."""

from fabricamp.loggers import CSVLogger as CSVLogger
from fabricamp.loggers import Logger as Logger
from fabricamp.loggers import TensorBoardLogger as TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
