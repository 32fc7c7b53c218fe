"""Writes a checkpoint when a fit fails."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fabricamp.arguments.checks import check_kind
from fabricamp.arguments.not_offered import is_lightnings
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.checkpoint import storage
from fabricamp.checkpoint.checkpoint_io import remove_by
from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Writes ``dirpath/filename.ckpt`` if an exception or Ctrl-C ends a fit, and removes the file when a later fit succeeds.

    An existing file of that name is replaced.  The checkpoint may contain a half-finished step, validation or hook.  After an
    exception within an update there is no state to save.

    Args:
        dirpath: the folder, or a URL that fsspec opens.
        filename: the name without ``.ckpt``.

    Raises:
        ConfigError: for an empty name; in a fit with several processes, or in a folder that cannot be written to.

    Example:
        >>> rescue = OnExceptionCheckpoint("checkpoints")
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        super().__init__()
        check_kind(self, "a path", dirpath=dirpath)
        check_kind(self, "a string", filename=filename)
        if not filename:
            raise ConfigError("OnExceptionCheckpoint(filename=''): give a name, such as 'on_exception'")
        self.dirpath = os.fspath(dirpath)
        self._folder = storage.normalized(dirpath)  # absolute: the script may change its folder before the exception
        self.filename = filename
        self._trains = False
        self._saved = False

    @property
    def ckpt_path(self) -> str:
        """The path of the file, below ``dirpath`` as it was given."""
        return storage.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    @property
    def _file(self) -> str:
        return storage.join(self._folder, self.filename + self.FILE_EXTENSION)

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Raises :class:`ConfigError` if no checkpoint could be written."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._trains = False
        self._saved = False
        if trainer.world_size > 1:
            raise ConfigError(
                f"OnExceptionCheckpoint with {trainer.world_size} processes: the rank that raised cannot gather the others' state; "
                "use ModelCheckpoint(every_n_train_steps=...) or train_time_interval instead"
            )
        if not trainer.fast_dev_run and (problem := storage.why_not_writable(self._folder)):
            raise ConfigError(f"OnExceptionCheckpoint(dirpath={self.dirpath!r}): {problem}; choose another folder")

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Notes that from now on there is a state to save."""
        self._trains = True

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Writes the file, if training had begun."""
        # Lightning's Trainer calls this for errors in setup too.
        if is_lightnings(trainer) or trainer.fast_dev_run:
            return
        if not self._trains or not trainer.state.fitting:
            return
        trainer.save_checkpoint(self._file)
        self._saved = True

    def teardown(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Removes the file of an earlier failed fit; a file of this fit (written at a signal) stays."""
        if stage == "fit" and not self._saved and not trainer.fast_dev_run and storage.exists(self._file):
            remove_by(trainer.strategy.checkpoint_io, self._file)
