"""The face of a logger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Logger"]


class Logger:
    """Takes the values of a flush; called on rank 0 only, never in the middle of a step."""

    @property
    def log_dir(self) -> Path | None:
        """The folder of this run, where the logger writes files."""
        return None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes the values of one flush; ``step`` is the ``global_step`` they belong to."""

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Takes the run's hyper-parameters once, before the first step."""

    def save(self) -> None:
        """Writes what is still in memory."""

    def close(self) -> None:
        """Ends the logger after ``fit``; it may be used again by a later one."""
