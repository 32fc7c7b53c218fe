"""Lightning's plug-ins that write and read checkpoints, given as ``Trainer(plugins=[...])``.

:class:`CheckpointIO` is the base of plug-ins.  :class:`TorchCheckpointIO` writes and reads fabricamp's files: with a subclass that
only overrides ``load_checkpoint``, a ModelCheckpoint writes and rotates its files as without a plug-in.  :class:`AsyncCheckpointIO`
writes in the background.  The functions after them call a plug-in: :func:`save_by` and :func:`remove_by` on rank 0,
:func:`load_by` on every rank.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import shutil
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricamp._utils.files import sync
from fabricamp.checkpoint import storage
from fabricamp.checkpoint.background import BackgroundWriter
from fabricamp.checkpoint.checksum import CHECKSUM
from fabricamp.checkpoint.file import write_checkpoint
from fabricamp.checkpoint.foreign import translated
from fabricamp.checkpoint.formats import upgraded
from fabricamp.checkpoint.objects import refusal
from fabricamp.checkpoint.packing import pack_objects, unpack_own
from fabricamp.checkpoint.plain import PRIVATE
from fabricamp.checkpoint.reading import read_checkpoint
from fabricamp.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp._utils.types import CheckpointFiles, StateDict
    from fabricamp.strategies.base import Strategy


class CheckpointIO(ABC):
    """The base of plug-ins that write and read checkpoints."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: StateDict, path: Any, storage_options: Any = None) -> None:
        """Writes ``checkpoint``, a dict in Lightning's layout, at ``path``; called on rank 0."""

    @abstractmethod
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> StateDict:
        """Returns the checkpoint at ``path``; called on every rank."""

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None:
        """Removes the checkpoint at ``path``; called on rank 0."""

    def teardown(self) -> None:  # noqa: B027 - a plug-in may have nothing to end
        """Called on rank 0 at the end of a run."""


class TorchCheckpointIO(CheckpointIO):
    """Writes and reads fabricamp's files, as a Trainer without a plug-in does."""

    def save_checkpoint(self, checkpoint: StateDict, path: Any, storage_options: Any = None) -> None:
        """Writes ``checkpoint`` beside ``path``, verifies it and renames it; there are no ``storage_options``."""
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__}.save_checkpoint takes no storage_options; override the method to use them"
            )
        write_checkpoint(path, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> StateDict:
        """Returns the verified content of the file at ``path``."""
        return read_checkpoint(path, "cpu" if map_location is None else map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file at ``path``, if it is there."""
        storage.remove(storage.normalized(path))


class WrappingCheckpointIO(CheckpointIO):
    """Passes all calls to another plug-in, by default a :class:`TorchCheckpointIO`; Lightning's ``_WrappingCheckpointIO``."""

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self._checkpoint_io = checkpoint_io

    @property
    def checkpoint_io(self) -> CheckpointIO | None:
        """The plug-in that is called; None means fabricamp's own files."""
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self._checkpoint_io = checkpoint_io

    @property
    def _called(self) -> CheckpointIO:
        return self._checkpoint_io or TorchCheckpointIO()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Lets the other plug-in save."""
        self._called.save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> StateDict:
        """Lets the other plug-in load."""
        return self._called.load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Lets the other plug-in remove."""
        self._called.remove_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        """Ends the other plug-in."""
        _end(self._called)


class AsyncCheckpointIO(WrappingCheckpointIO):
    """Writes in the background.

    Without another plug-in, the Trainer's ModelCheckpoints write as :class:`~fabricamp.callbacks.AsyncCheckpoint` does.  Around
    another plug-in, the state is copied to host memory, and a thread lets the plug-in save it.  One write is in flight: the next
    save, a removal, a load and the end of the run wait for it, and raise the error with which it failed.

    Example:
        >>> io = AsyncCheckpointIO()
    """

    _writer: BackgroundWriter | None = None

    def __getstate__(self) -> StateDict:
        """Returns the state without the thread."""
        return {key: value for key, value in vars(self).items() if key != "_writer"}

    def save_checkpoint(self, checkpoint: StateDict, path: Any, storage_options: Any = None) -> None:
        """Starts a write, once the previous one has ended."""
        # Passed on only if it is given: a plug-in may lack this argument.
        options = {} if storage_options is None else {"storage_options": storage_options}
        self.start(checkpoint, lambda copied: self._called.save_checkpoint(copied, path, **options))

    def start(self, checkpoint: StateDict, write: Callable[[StateDict], None]) -> None:
        """Calls ``write`` in the thread with a copy of ``checkpoint``."""
        self.wait()
        self._writer = self._writer or BackgroundWriter()
        packed = pack_objects(checkpoint)
        copied = self._writer.take(packed)
        if packed is not checkpoint:
            self._writer.wait_for_copy()
            unpack_own(copied)  # here, not in the thread: code of the program may consume the run's random numbers
        self._writer.write_copy(copied, write)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> StateDict:
        """Loads, once the write in flight has ended."""
        self.wait()
        return super().load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Removes, once the write in flight has ended: an older file is removed only after the newer one is written."""
        self.wait()
        super().remove_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        """Waits for the write in flight."""
        self.wait()
        super().teardown()

    def wait(self) -> None:
        """Waits for the write in flight; raises the error with which it failed."""
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except CheckpointError as error:
            raise error.__cause__ or error from None  # the plug-in's own error, as in Lightning


def innermost(io: CheckpointFiles | None) -> CheckpointFiles | None:
    """Returns the plug-in that writes, without the plug-ins that wrap it; None if fabricamp writes."""
    while isinstance(io, WrappingCheckpointIO):
        io = io.checkpoint_io
    return io


def writes_own_files(io: CheckpointFiles | None) -> bool:
    """Returns whether fabricamp writes the files of a run with this plug-in: no class overrides how they are saved or removed."""
    while io is not None:
        saves = (
            TorchCheckpointIO.save_checkpoint,
            WrappingCheckpointIO.save_checkpoint,
            AsyncCheckpointIO.save_checkpoint,
        )
        removes = (
            TorchCheckpointIO.remove_checkpoint, WrappingCheckpointIO.remove_checkpoint, AsyncCheckpointIO.remove_checkpoint,
        )  # fmt: skip
        if type(io).save_checkpoint not in saves or type(io).remove_checkpoint not in removes:
            return False
        io = io.checkpoint_io if isinstance(io, WrappingCheckpointIO) else None
    return True


def reads_own_files(io: CheckpointFiles | None) -> bool:
    """Returns whether fabricamp reads the files of a run with this plug-in: no class overrides how they are loaded."""
    loads = (TorchCheckpointIO.load_checkpoint, WrappingCheckpointIO.load_checkpoint, AsyncCheckpointIO.load_checkpoint)
    while io is not None:
        if type(io).load_checkpoint not in loads:
            return False
        io = io.checkpoint_io if isinstance(io, WrappingCheckpointIO) else None
    return True


def is_asynchronous(io: CheckpointFiles | None) -> bool:
    """Returns whether the plug-in, or one of those that it wraps, is an :class:`AsyncCheckpointIO`."""
    while isinstance(io, WrappingCheckpointIO):
        if isinstance(io, AsyncCheckpointIO):
            return True
        io = io.checkpoint_io
    return False


def save_by(io: CheckpointFiles, checkpoint: StateDict, path: str) -> None:
    """Lets the plug-in save ``checkpoint`` at ``path``, in the background if it is an :class:`AsyncCheckpointIO`.

    A local file gets its name only when it is complete: the plug-in writes to a temporary path in the same folder.  If it wrote
    exactly one file there, that file is flushed and renamed.  Any other plug-in (it writes a folder, several files, or elsewhere)
    gets ``path`` itself; with such a plug-in a kill may leave half a checkpoint.
    """
    if isinstance(io, AsyncCheckpointIO) and type(io).save_checkpoint is AsyncCheckpointIO.save_checkpoint:
        inner = io.checkpoint_io or TorchCheckpointIO()
        io.start(checkpoint, lambda copied: _save(inner, copied, path))
    else:
        _save(io, checkpoint, path)


_BESIDE = "_fabricamp_writes_one_file"
"""The attribute that notes whether a plug-in writes one local file, at the path that it is given."""


def _save(io: CheckpointFiles, checkpoint: StateDict, path: str) -> None:
    remote = storage.is_remote(path)
    if not remote:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if remote or not getattr(io, _BESIDE, True):
        io.save_checkpoint(checkpoint, path)
        return
    target = Path(path)
    # The same name each time, so killed writers leave at most one such file.
    beside = target.with_name(f".partial-{target.name}")
    _remove_entry(beside)
    before = set(os.listdir(target.parent))  # noqa: PTH208 - names
    try:
        io.save_checkpoint(checkpoint, str(beside))
        made = set(os.listdir(target.parent)) - before  # noqa: PTH208 - names
        one_file = made <= {beside.name} and beside.is_file() and not beside.is_symlink()
        if one_file:
            if checkpoint.get(PRIVATE):
                beside.chmod(0o600)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(target)
            sync(target.parent)
    except BaseException:
        _remove_entry(beside)
        raise
    if not one_file:
        with contextlib.suppress(Exception):  # a plug-in may refuse to remove a path that it has not recorded
            io.remove_checkpoint(str(beside))
        _remove_entry(beside)
        # A class with __slots__ cannot keep the note, so each save tries again.
        with contextlib.suppress(AttributeError):
            setattr(io, _BESIDE, False)
        io.save_checkpoint(checkpoint, path)


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_by(io: CheckpointFiles | None, path: str) -> None:
    """Removes a checkpoint that the plug-in has saved; without a plug-in one of fabricamp's."""
    if io is None:
        storage.remove(path)
    else:
        io.remove_checkpoint(path)


def load_by(
    io: CheckpointFiles, path: str, *, weights_only: bool | None = None, map_location: Any = "cpu"
) -> StateDict:
    """Returns the checkpoint that the plug-in loads, with fabricamp's keys.

    ``weights_only`` is passed only to a plug-in that takes it.  Raises :class:`CheckpointError` for any error of the plug-in, and
    :class:`CheckpointObjectsError` if torch refuses objects in the file: such a file is not damaged.
    """
    # True, not None: torch.load(weights_only=None) follows an environment variable.
    given: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only is not False}
    parameters = inspect.signature(io.load_checkpoint).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if isinstance(io, WrappingCheckpointIO) and takes_all:
        inner = innermost(io)
        parameters = inspect.signature((inner or TorchCheckpointIO()).load_checkpoint).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options = {name: value for name, value in given.items() if takes_all or name in parameters}
    try:
        state = io.load_checkpoint(path, **options)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{type(io).__name__} found no checkpoint {path}: {error}", path) from None
    except pickle.UnpicklingError as error:
        # torch names the class that it does not allow; without a name the file is damaged.
        if weights_only is not False and "GLOBAL" in str(error):
            words = str(error).partition("GLOBAL ")[2].partition(" was not")[0]
            raise refusal(path, [f"{words}, says {type(io).__name__}"]) from None
        raise CheckpointError(f"{type(io).__name__} cannot load {path}: {error}") from error
    except Exception as error:  # code of the program
        raise CheckpointError(f"{type(io).__name__} cannot load {path}: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        raise CheckpointError(
            f"{type(io).__name__}.load_checkpoint({path!r}) returned {_described(state)}; it has to return the dict that "
            "save_checkpoint got, with its 'state_dict'"
        )
    content = {key: value for key, value in state.items() if key != CHECKSUM}
    return upgraded(translated(content, path), path)


def _described(value: object) -> str:
    return (
        f"a dict with the keys {', '.join(map(repr, value)):.300}"
        if isinstance(value, dict)
        else f"a {type(value).__name__}"
    )


def wait_for(io: CheckpointFiles | None) -> None:
    """Waits for a write in flight, and raises its error."""
    while isinstance(io, WrappingCheckpointIO):
        if isinstance(io, AsyncCheckpointIO):
            io.wait()
        io = io.checkpoint_io


def end_plugin(strategy: Strategy, *, failed: bool) -> None:
    """Ends the strategy's plug-in after a run; raises the error of the write in flight, after a failed run only warns of it."""
    io = strategy.checkpoint_io
    if io is None:
        return
    if not failed:
        strategy.on_rank_zero(lambda: _end(io))
    elif strategy.rank == 0:  # the other ranks may be gone
        try:
            _end(io)
        except Exception as error:  # noqa: BLE001 - the error that ended the run is raised
            warnings.warn(f"a checkpoint was not written: {error}", RuntimeWarning, stacklevel=2)


def _end(io: CheckpointFiles) -> None:
    # A plug-in that does not derive from this class may have no such method.
    end = getattr(io, "teardown", None)
    if end is not None:
        end()
