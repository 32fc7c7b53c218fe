"""Files of a Loop: where a name leads, and writes in the background."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fabricamp.checkpoint.background import BackgroundWriter, StagedFolder
from fabricamp.checkpoint.file import write_checkpoint
from fabricamp.checkpoint.form import form_of
from fabricamp.errors import CheckpointError
from fabricamp.strategies.process_group import SideProcessGroup

if TYPE_CHECKING:
    from fabricamp._utils.types import StateDict
    from fabricamp.own_loop.session import LoopSession


def is_name(path: str | Path) -> bool:
    """Returns whether ``path`` is a name such as "last", which stands for a file in ``default_root_dir``; else it is a path."""
    return isinstance(path, str) and path == Path(path).name and not Path(path).suffix


def path_of(path: str | Path, folder: str) -> str:
    """Returns the path of the file: of a name, ``folder``/name.ckpt."""
    return str(Path(folder) / f"{path}.ckpt") if is_name(path) else str(path)


class BackgroundSaves:
    """Writes a session's checkpoints in a thread, one at a time; every rank calls each method."""

    def __init__(self, session: LoopSession) -> None:
        self._session = session
        self._writer = BackgroundWriter()
        all_write = form_of(session.strategy).all_ranks_write
        self._beside = SideProcessGroup(session.strategy) if all_write else None
        self._in_flight = False  # equal on every rank, unlike the progress of rank 0's thread

    def save(self, path: str) -> None:
        """Copies the state to host memory and begins to write it, after the write before."""
        self.settle()
        self._in_flight = True
        self._session.save_checkpoint(
            path, weights_only=False, write=self._write_file if self._beside is None else self._write_folder
        )

    def settle(self) -> None:
        """Waits for the write in flight; every rank raises its :class:`CheckpointError`."""
        if not self._in_flight:
            return
        self._in_flight = False
        strategy = self._session.strategy
        if self._beside is None:
            strategy.on_rank_zero(self._writer.wait)
            return
        problem: CheckpointError | None = None
        try:
            self._writer.wait()
        except CheckpointError as error:
            problem = error
        strategy.agree(problem)

    def close(self) -> None:
        """Waits for the last write, and gives back its memory and its group."""
        try:
            self.settle()
        finally:
            self._writer.release()
            if self._beside is not None:
                self._beside.leave()

    def wait_alone(self) -> None:
        """Waits for this process's write: at the end of a process whose program has not closed its Loop."""
        self._writer.wait()

    def _write_file(self, path: str, state: StateDict) -> None:
        def write(copied: StateDict) -> None:
            self._session.delivery.barrier(copied.get("global_step", 0))
            write_checkpoint(path, copied)

        self._writer.start(state, write)

    def _write_folder(self, path: str, state: StateDict) -> None:
        beside = self._beside
        assert beside is not None
        folder = StagedFolder(path, state, beside)
        problem: CheckpointError | None = None
        copied: StateDict = {}
        try:
            copied = self._writer.take(folder.own)
        except CheckpointError as error:
            problem = error
        self._session.strategy.agree(problem)

        def write(own: StateDict) -> None:
            beside.on_rank_zero(lambda: self._session.delivery.barrier(folder.step))
            folder.write(own)

        self._writer.write_copy(copied, write)
