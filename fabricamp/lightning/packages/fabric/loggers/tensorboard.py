"""``lightning.fabric.loggers.TensorBoardLogger``: fabricamp's, with the arguments of Fabric's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp import loggers

if TYPE_CHECKING:
    import os


class _TensorBoardLogger(loggers.TensorBoardLogger):
    """Logs to ``root_dir/name/version_N``."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, default_hp_metric, sub_dir=sub_dir, **options)


TensorBoardLogger = _TensorBoardLogger
"""A class of this name would be a second one beside the Trainer's, for the short name in a command line or a configuration."""
