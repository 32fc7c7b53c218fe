"""``lightning.fabric.loggers.CSVLogger``: fabricamp's, with the arguments of Fabric's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp import loggers

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class _CSVLogger(loggers.CSVLogger):
    """Logs to ``root_dir/name/version_N/metrics.csv``; values without a step get the number of the rows so far."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)
        self._logged = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds a row."""
        super().log_metrics(metrics, self._logged if step is None else step)
        self._logged += 1


CSVLogger = _CSVLogger
"""A class of this name would be a second one beside the Trainer's, for the short name in a command line or a configuration."""
