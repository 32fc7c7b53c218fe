"""The folder of a run, ``save_dir/name/version_N``: one for all ranks, never shared by two runs that start at once."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fabricamp.checkpoint import plain
from fabricamp.errors import ConfigError
from fabricamp.files import replace_text
from fabricamp.first_rank import started_rank
from fabricamp.loggers.base import Logger

_HYPERPARAMETERS = "hparams.yaml"


def writes() -> bool:
    """Whether this process is the one that writes: rank 0 of the process group, or of what torchrun or SLURM started."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return started_rank() == 0


class RunFolderLogger(Logger):
    """A logger with a folder of its own, in which it writes the hyper-parameters once."""

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
    ) -> None:
        if not isinstance(save_dir, (str, os.PathLike)):
            raise ConfigError(f"{type(self).__name__}(save_dir={save_dir!r}): give a folder, such as 'runs'")
        if not isinstance(version, (int, str, type(None))) or (isinstance(version, int) and version < 0):
            raise ConfigError(
                f"{type(self).__name__}(version={version!r}): choose a number from 0, a name, or None for the next free one"
            )
        self._root = Path(save_dir).expanduser().absolute() / (name or "")
        self.save_dir = str(Path(save_dir).expanduser().absolute())
        self.name = name or ""
        self._version = version
        self._claimed = False
        self._prefix = prefix
        self._hyperparameters: dict[str, Any] = {}

    @property
    def root_dir(self) -> str:
        """The folder that holds the versions."""
        return str(self._root)

    @property
    def version(self) -> int | str:
        """The number or name of this run; the first use on rank 0 takes the next free number, and makes its folder.

        On other ranks it has to be set to rank 0's.
        """
        if self._version is None:
            if not writes():
                raise ConfigError(
                    f"{type(self).__name__}.version is decided by rank 0 when fit starts, and is not known on this rank before"
                )
            try:
                self._version, self._claimed = _claim_version(self._root), True
            except OSError as error:
                raise ConfigError(
                    f"{type(self).__name__} cannot make a folder for this run in {self.root_dir}: {error.strerror or error}; give "
                    "another folder (save_dir, or the Trainer's default_root_dir), or logger=False"
                ) from error
        return self._version

    @version.setter
    def version(self, version: int | str) -> None:
        self._version = version

    def identity(self) -> int | str:
        """The version."""
        return self.version

    def join(self, identity: int | str) -> None:
        """Takes rank 0's version."""
        self.version = identity

    @property
    def log_dir(self) -> str:
        """The folder of this run."""
        return str(self.folder)

    @property
    def folder(self) -> Path:
        """The folder of this run, as a path."""
        version = self.version
        return self._root / (f"version_{version}" if isinstance(version, int) else version)

    def give_back(self) -> None:
        """Gives a number that was taken back, where nothing was written: the run failed before it began."""
        if not self._claimed:
            return
        try:
            self.folder.rmdir()
        except OSError:  # something is in it
            return
        self._version, self._claimed = None, False

    def run_folders(self) -> list[Path]:
        """The folders of this run and of those before it that had numbers, newest first."""
        found = [re.fullmatch(r"version_(\d+)", entry.name) for entry in self._root.glob("version_*")]
        numbers = sorted({int(number[1]) for number in found if number}, reverse=True)
        return list(dict.fromkeys([self.folder, *(self._root / f"version_{number}" for number in numbers)]))

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Writes the hyper-parameters to ``hparams.yaml``; a second call adds to them."""
        added = plain(params)
        if not writes() or (self._hyperparameters and added.items() <= self._hyperparameters.items()):
            return
        self._hyperparameters |= added
        self._write_hyperparameters()

    def _write_hyperparameters(self) -> None:
        yaml: Any = importlib.import_module("yaml")
        self.folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(showable(self._hyperparameters), sort_keys=False, allow_unicode=True)
        replace_text(self.folder / _HYPERPARAMETERS, text, private=self.private)


def flattened(params: Mapping[str, Any], above: str = "") -> dict[str, bool | float | str]:
    """Nested parameters as ``outer/inner``; what is no number or string as its ``str``."""
    flat: dict[str, bool | float | str] = {}
    for key, value in params.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{above}{key}/")
        else:
            flat[f"{above}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def _claim_version(root: Path) -> int:
    """Makes the folder of the next free number; ``mkdir`` tells which of two runs came first."""
    root.mkdir(parents=True, exist_ok=True)
    numbers = (re.fullmatch(r"version_(\d+)", entry.name) for entry in root.iterdir())
    version = max((int(number[1]) + 1 for number in numbers if number), default=0)
    while True:
        try:
            (root / f"version_{version}").mkdir()
        except FileExistsError:
            version += 1
        else:
            return version


def showable(value: Any) -> Any:
    """``value`` as YAML shows it; what YAML has no word for as its ``str``."""
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): showable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [showable(item) for item in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def edges_of(counts: Sequence[float], limits: tuple[float, float]) -> list[float]:
    """The limits of a histogram's bins, one more than there are."""
    low, high = limits
    width = (high - low) / len(counts)
    return [*(low + width * index for index in range(len(counts))), high]
