"""SaveConfigCallback: writes the configuration of a run into its log folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fabricamp.callbacks.base import Callback
from fabricamp.errors import ConfigError, FileThereError
from fabricamp.lightning.cli.parser import LightningArgumentParser

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class SaveConfigCallback(Callback):
    """Writes the configuration to ``config.yaml`` in the log folder; ``--config`` of that file starts the same run.

    Args:
        parser: the parser that the configuration comes from.
        config: the configuration.
        config_filename: the name of the file.
        overwrite: replaces a file that is there; False raises an error before the run.
        multifile: writes a file for each file that the configuration was read from.
        save_to_log_dir: False writes nothing; override :meth:`save_config`.

    Raises:
        ConfigError: for ``save_to_log_dir=False`` without an override.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigError(
                "save_to_log_dir=False saves nothing; override save_config, or give save_config_callback=None"
            )
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Saves the configuration, in the first run; raises :class:`FileThereError` for a file that it may not replace."""
        if self.already_saved:
            return
        if self.save_to_log_dir and not trainer.fast_dev_run:
            folder = trainer.log_dir
            assert folder is not None
            path = os.path.join(folder, self.config_filename)  # noqa: PTH118 - a folder may be a URL
            if trainer.strategy.on_rank_zero(lambda: not self.overwrite and os.path.isfile(path)):  # noqa: PTH113
                raise FileThereError(
                    f"{path} is there, and would be replaced by this run's configuration; give another log folder, "
                    "save_config_kwargs={'overwrite': True}, or save_config_callback=None"
                )
            if trainer.is_global_zero:
                if "://" not in folder:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                self.parser.save(
                    self.config, path, skip_unset=False, overwrite=self.overwrite, multifile=self.multifile
                )
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Called on rank 0 in the first run; override it to save the configuration elsewhere, for example in a logger."""
