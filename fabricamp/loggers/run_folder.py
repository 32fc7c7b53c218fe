"""The folder of a run, ``save_dir/name/version_N``: one for all ranks, never shared by two runs that start together."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Generic

import torch

from fabricamp._utils.files import replace_text
from fabricamp._utils.first_rank import started_rank
from fabricamp._utils.types import StateDict
from fabricamp.checkpoint import plain, storage
from fabricamp.errors import ConfigError
from fabricamp.habits import habits
from fabricamp.loggers.base import Logger
from fabricamp.loggers.write_queue import Content, Position, Record, RecordQueue


class DefaultName(str):
    """The default of ``name``; a class of its own, as a program may give the same text."""

    __slots__ = ()


RUNS: Final = DefaultName("fabricamp_logs")


def name_of_runs(name: str | None = RUNS) -> str:
    """Returns ``name`` as a plain string, "" for None; for :data:`RUNS` the name that this program expects."""
    if isinstance(name, DefaultName):
        return "lightning_logs" if habits().runs_are_in_lightning_logs else str(RUNS)
    return name or ""


def writes() -> bool:
    """Returns whether this process writes logs: rank 0 of the process group, or of the processes of torchrun or SLURM."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return started_rank() == 0


class RunFolderLogger(Logger, Generic[Content, Position]):
    """Base class of loggers with a folder per run; a thread writes the hyper-parameters and the records (:meth:`_append`).

    A record has a ``Content``, and the log's file ends at a ``Position``.
    """

    name: str
    save_dir: str
    sub_dir: str | None = None
    """A folder within the run's, for its files; None: there is none."""
    NAME_HPARAMS_FILE = "hparams.yaml"
    MOST_WAITING: ClassVar[int]
    """The largest sum of the weights of records that wait in memory for a disk that refuses them."""

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
    ) -> None:
        if not isinstance(save_dir, (str, os.PathLike)):
            raise ConfigError(f"{type(self).__name__}(save_dir={save_dir!r}): give a folder, such as 'runs'")
        if not isinstance(version, (int, str, type(None))) or (isinstance(version, int) and version < 0):
            raise ConfigError(
                f"{type(self).__name__}(version={version!r}): choose a number from 0, a name, or None for the next free one"
            )
        for key, value in {"name": name, "prefix": prefix}.items():
            if not isinstance(value, (str, type(None))):
                raise ConfigError(f"{type(self).__name__}({key}={value!r}): give a string or None")
        # Absolute, so a change of the working folder does not move the files; ``save_dir`` keeps the path as given.
        self._saves_in = Path(save_dir).expanduser().absolute()
        self.save_dir = os.fspath(save_dir)
        vars(self)["name"] = name_of_runs(name)  # past a subclass's property, which may have no setter
        self._version = version
        self._claimed = False
        self._prefix = prefix
        self._hyperparameters: dict[str, Any] = {}
        self._hyperparameters_text = ""
        """What the file of hyper-parameters says."""
        self._in_run = False  # on rank 0
        self._begin_anew()

    @property
    def root_dir(self) -> str:
        """The folder that holds the versions; relative if ``save_dir`` is."""
        return str(Path(self.save_dir, self.name or ""))

    @property
    def _root(self) -> Path:
        """The absolute folder that holds the versions; read when it is used, as a subclass may compute ``name``."""
        return self._saves_in / (self.name or "")

    @property
    def version(self) -> int | str:
        """The number or name of this run; the first use on rank 0 takes the next free number, and creates its folder.

        On other ranks the version has to be set to rank 0's.
        """
        if self._version is None:
            if not writes():
                raise ConfigError(
                    f"{type(self).__name__}.version is decided by rank 0 when fit starts, and is not known on this rank before"
                )
            try:
                self._version = _claim_version(self._root)
                self._claimed = True
            except OSError as error:
                raise ConfigError(
                    f"{type(self).__name__} cannot make a folder for this run in {self._root}: {error.strerror or error}; give "
                    "another folder (save_dir, or the Trainer's default_root_dir), or logger=False"
                ) from None
        return self._version

    @version.setter
    def version(self, version: int | str) -> None:
        self._version = version

    def identity(self) -> int | str:
        """Returns the version; a run begins."""
        self._in_run = True
        return self.version

    def join(self, identity: int | str) -> None:
        """Adopts rank 0's version."""
        self.version = identity

    @property
    def log_dir(self) -> str:
        """The folder of this run; relative if ``save_dir`` is."""
        return str(Path(self.root_dir).expanduser() / self._folder_name / (self.sub_dir or ""))

    @property
    def folder(self) -> Path:
        """The absolute folder of this run, independent of the working folder."""
        return self._root / self._folder_name / (self.sub_dir or "")

    @property
    def _folder_name(self) -> str:
        version = self.version
        return f"version_{version}" if isinstance(version, int) else version

    def give_back(self) -> None:
        """Releases the number, if nothing was written: the run failed before it began, or had nothing left to train."""
        if not self._claimed:
            return
        try:
            (self._root / self._folder_name).rmdir()
        except OSError:  # it is not empty
            return
        self._version = None
        self._claimed = False

    def run_folders(self) -> list[Path]:
        """Returns the folders of this run and of earlier runs with numbers, newest first."""
        matches = [re.fullmatch(r"version_(\d+)", entry.name) for entry in self._root.glob("version_*")]
        numbers = sorted({int(match[1]) for match in matches if match}, reverse=True)
        earlier = [self._root / f"version_{number}" / (self.sub_dir or "") for number in numbers]
        return list(dict.fromkeys([self.folder, *earlier]))

    def log_hyperparams(
        self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Writes the hyper-parameters to ``hparams.yaml``; a second call adds to them.

        Outside of a run the file is there when the call returns.
        """
        added = plain(params or {})
        if not writes():
            return
        with contextlib.suppress(OSError):  # the thread, which writes the file, reports it
            self.folder.mkdir(parents=True, exist_ok=True)
        self._hyperparameters |= added
        yaml: Any = importlib.import_module("yaml")
        # Compared as text: values themselves may be arrays, which have no == with one answer.
        text = yaml.safe_dump(showable(self._hyperparameters), sort_keys=False, allow_unicode=True)
        if text != self._hyperparameters_text:
            self._hyperparameters_text = text
            self._write_hyperparameters(text)
            if not self._in_run:
                self.save()

    def save(self) -> None:
        """Lets the thread write the records in memory; waits for at most 30 seconds."""
        with self.trouble.guard():
            self._backlog.write_soon()
            self._backlog.wait()
        self._backlog.report(self.trouble)

    def begin(self) -> None:
        """Starts the thread that writes."""
        if writes():
            self._backlog.start()

    def barrier(self, step: int) -> None:
        """Returns once all records so far are on disk."""
        queue = self._backlog
        queue.write_soon()
        queue.call_soon(self._sync)
        queue.wait(patient=True)

    def close(self) -> None:
        """Writes the waiting records, for up to 30 seconds."""
        self._in_run = False
        self._backlog.close(self.trouble)

    # -- called by the thread ----------------------------------------------------------------------------------------------------

    def _look(self) -> Position:
        """Returns the end position of the log's file; called by the thread."""
        raise NotImplementedError

    def _append(self, records: list[Content]) -> Position:
        """Appends ``records`` to the log's file; returns its new end position; called by the thread."""
        raise NotImplementedError

    def _sync(self) -> None:
        """Returns once the appended records are on disk; called by the thread."""
        raise NotImplementedError

    @property
    def _backlog(self) -> RecordQueue[Content, Position]:
        """The queue of records of this process's thread."""
        if self._waiting.process != os.getpid():  # forked: the thread and its records are the parent's
            self._begin_anew(self._waiting.unrequested())
        return self._waiting

    def _begin_anew(self, records: Iterable[Record[Content]] = ()) -> None:
        self._waiting: RecordQueue[Content, Position] = RecordQueue(
            self._look, self._append, self.MOST_WAITING, lambda: self.folder, records
        )

    def _write_hyperparameters(self, text: str) -> None:
        folder = self.folder
        private = self.private

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / self.NAME_HPARAMS_FILE, text, private=private)

        self._backlog.call_soon(write)

    def __getstate__(self) -> StateDict:
        return {**self.__dict__, "_waiting": self._waiting.unrequested()}  # one thread per process

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self._begin_anew(state["_waiting"])


def _claim_version(root: Path) -> int:
    """Creates the folder of the next free number; ``mkdir`` decides which of two concurrent runs gets a number."""
    root.mkdir(parents=True, exist_ok=True)
    matches = (re.fullmatch(r"version_(\d+)", entry.name) for entry in root.iterdir())
    version = max((int(match[1]) + 1 for match in matches if match), default=0)
    while True:
        try:
            (root / f"version_{version}").mkdir()
        except FileExistsError:
            version += 1
        else:
            return version


def folder_of(logger: Logger) -> str | None:
    """Returns the folder of a logger's run as an absolute path or URL; None if the logger has no folder."""
    if isinstance(logger, RunFolderLogger):
        return str(logger.folder)
    return None if logger.log_dir is None else storage.normalized(logger.log_dir)


def flattened(params: Mapping[str, Any], above: str = "") -> dict[str, bool | float | str]:
    """Returns nested parameters as ``outer/inner``; values other than numbers and strings become their ``str``."""
    flat: dict[str, bool | float | str] = {}
    for key, value in params.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{above}{key}/")
        else:
            flat[f"{above}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def showable(value: object) -> Any:
    """Converts ``value`` to YAML's types; values of other types become their ``str``."""
    if isinstance(value, dict):
        return {key if isinstance(key, str | int) else str(key): showable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [showable(item) for item in value]
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def edges_of(counts: Sequence[float], limits: tuple[float, float]) -> list[float]:
    """Returns the edges of a histogram's bins, one more than there are bins."""
    low, high = limits
    width = (high - low) / len(counts)
    return [*(low + width * index for index in range(len(counts))), high]
