"""Lightning's path to the CSVLogger."""

from __future__ import annotations

from fabricamp.loggers.csv import CSVLogger

__all__ = ["CSVLogger"]
