"""The saves of a ModelCheckpoint whose class or object overrides one of Lightning's methods, or whose files a plug-in writes.

A save is these calls, on every rank, as in Lightning::

    _should_skip_saving_checkpoint
    _monitor_candidates
    _save_topk_checkpoint
        _save_monitor_checkpoint            with a monitor: check_monitor_top_k, then
            _update_best_and_save
        _save_none_monitor_checkpoint       without one
            _get_metric_interpolated_filepath_name
            _save_checkpoint
            _should_remove_checkpoint, _remove_checkpoint
    _save_last_checkpoint                   _save_checkpoint or _link_checkpoint

What such a method assigns (``best_k_models``, ``current_score``, ...) is the callback's state from then on.
"""

from __future__ import annotations

import functools
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fabricamp.callbacks._checkpoint_files import WRITTEN_BY, SavePlan
from fabricamp.callbacks._monitoring import metric_tensors
from fabricamp.checkpoint import read_header, storage
from fabricamp.checkpoint.checkpoint_io import remove_by
from fabricamp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")


def _occasion(save: Callable[[MethodRotation, Trainer], None]) -> Callable[[MethodRotation, Trainer], None]:
    """Marks all files that ``save`` writes as this callback's, also those that an override gives to the Trainer."""

    @functools.wraps(save)
    def run(rotation: MethodRotation, trainer: Trainer) -> None:
        callback = rotation._callback
        if trainer.fast_dev_run:
            return
        callback._settle(trainer)
        callback._rotating = True
        try:
            save(rotation, trainer)
        finally:
            callback._rotating = False

    return run


class MethodRotation:
    """Makes the saves of ``callback`` by calling its methods; a method that is not overridden calls its default here.

    A default has the method's name without the underscore; that of ``_get_metric_interpolated_filepath_name`` is :meth:`free_name`.
    """

    def __init__(self, callback: ModelCheckpoint) -> None:
        self._callback = callback

    # -- the occasions of a save -------------------------------------------------------------------------------------------------

    @_occasion
    def at_step(self, trainer: Trainer) -> None:
        """Saves by the score; if it was not logged yet, the next validation makes the save, as in Lightning."""
        callback = self._callback
        unknown = callback.monitor is not None and callback.monitor not in callback._metrics(trainer)
        if unknown and not trainer.state.validating_in_fit:
            callback._waits = True
        elif not callback._should_skip_saving_checkpoint(trainer):
            candidates = self._shared_candidates(trainer)
            callback._save_topk_checkpoint(trainer, candidates)
            callback._save_last_checkpoint(trainer, candidates)

    @_occasion
    def at_epoch_end(self, trainer: Trainer) -> None:
        """Saves if the epoch is due; the ``save_last`` file is made only beside another one."""
        callback = self._callback
        if callback._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._shared_candidates(trainer)
        if callback._is_due_epoch(trainer):
            callback._save_topk_checkpoint(trainer, candidates)
        links = callback.save_last == "link" and bool(callback._last_checkpoint_saved)
        if links or callback._saved_step == trainer.global_step:
            callback._save_last_checkpoint(trainer, candidates)

    @_occasion
    def at_end(self, trainer: Trainer) -> None:
        """Writes the ``save_last`` file and no other, as in Lightning."""
        self._callback._save_last_checkpoint(trainer, self._shared_candidates(trainer))

    @_occasion
    def at_exception(self, trainer: Trainer) -> None:
        """Saves whatever the score, and also with ``save_top_k=0``, as in Lightning; then writes the ``save_last`` file.

        Without ``save_last``, ``last_model_path`` names the file.
        """
        callback = self._callback
        candidates = self._shared_candidates(trainer)
        path = callback._get_metric_interpolated_filepath_name(candidates, trainer)
        callback._save_checkpoint(trainer, path)
        if callback.save_last:
            callback._save_last_checkpoint(trainer, candidates)
        else:
            callback.last_model_path = path

    def _shared_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Returns rank 0's metrics on every rank: all ranks choose the same names and the same top k."""
        return trainer.strategy.broadcast(self._callback._monitor_candidates(trainer))

    # -- the methods of a save ---------------------------------------------------------------------------------------------------

    def monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Returns the metrics by which files are ranked and named, with ``epoch`` and ``step`` as whole numbers."""
        counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        whole = {name: torch.tensor(count, dtype=torch.int32, device="cpu") for name, count in counts.items()}
        return {**metric_tensors(self._callback._metrics(trainer)), **whole}

    def save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves one file by its score, or without a monitor the newest."""
        callback = self._callback
        if callback.save_top_k == 0:
            return
        if callback.monitor is None:
            callback._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        if callback.monitor not in monitor_candidates:
            callback._check_monitor(trainer, ranked=True)
        callback._save_monitor_checkpoint(trainer, monitor_candidates)

    def save_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves a file if its score is among the top k; with ``verbose``, a line says of a score that it is not."""
        callback = self._callback
        current = monitor_candidates.get(str(callback.monitor))
        if callback.check_monitor_top_k(trainer, current):
            assert current is not None
            callback._update_best_and_save(current, trainer, monitor_candidates)
        elif current is not None and callback.verbose and trainer.is_global_zero:
            step = int(monitor_candidates["step"])
            _LOG.info("%s: step %d is not among the top %d", type(callback).__name__, step, callback.save_top_k)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Returns whether a file with the score ``current`` would be among the top k; the same on every rank."""
        callback = self._callback
        if current is None:
            return False
        if callback.save_top_k == -1 or len(callback.best_k_models) < callback.save_top_k:
            return True
        worst = callback.best_k_models.get(callback.kth_best_model_path, callback.kth_value)
        better = torch.lt if callback.mode == "min" else torch.gt
        return trainer.strategy.reduce_boolean_decision(bool(better(current, worst.to(current.device))))

    def update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Puts a file with the score ``current`` into the top k, writes it, and removes the file that it replaces."""
        callback = self._callback
        models = callback._shared_models
        k = len(models) + 1 if callback.save_top_k == -1 else callback.save_top_k
        replaced = ""
        if 0 < k == len(models):
            replaced = callback.kth_best_model_path
            models.pop(replaced)
        if torch.isnan(current):
            current = torch.full_like(current, float("inf" if callback.mode == "min" else "-inf"))
        path = callback._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced or None)
        models = callback._shared_models
        models[path] = current
        callback.current_score = current
        worst_of, best_of = (max, min) if callback.mode == "min" else (min, max)
        if len(models) == k:
            callback.kth_best_model_path = worst_of(models, key=lambda one: float(models[one]))
            callback.kth_value = models[callback.kth_best_model_path]
        callback.best_model_path = best_of(models, key=lambda one: float(models[one]))
        callback.best_model_score = models[callback.best_model_path]
        callback._save_checkpoint(trainer, path)
        if replaced and callback._should_remove_checkpoint(trainer, replaced, path):
            callback._remove_checkpoint(trainer, replaced)

    def save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves the newest file; with ``save_top_k=1`` removes the one before it."""
        callback = self._callback
        previous = callback.best_model_path
        path = callback._get_metric_interpolated_filepath_name(monitor_candidates, trainer, previous)
        callback.best_model_path = path
        callback._save_checkpoint(trainer, path)
        if callback.save_top_k == 1 and previous and callback._should_remove_checkpoint(trainer, previous, path):
            callback._remove_checkpoint(trainer, previous)

    def save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Writes the ``save_last`` file, or makes it a link to the newest one; removes the previous one of another name."""
        callback = self._callback
        if not callback.save_last:
            return
        previous = callback.last_model_path
        path = self.free_name(monitor_candidates, trainer, previous, callback.CHECKPOINT_NAME_LAST)
        callback.last_model_path = path
        newest = callback._last_checkpoint_saved
        if callback.save_last == "link" and newest and callback.save_top_k != 0:
            callback._link_checkpoint(trainer, newest, path)
        else:
            callback._save_checkpoint(trainer, path)
        if previous and callback._should_remove_checkpoint(trainer, previous, path):
            callback._remove_checkpoint(trainer, previous)

    def free_name(
        self, metrics: dict[str, Tensor], trainer: Trainer, own: str | None, filename: str | None = None
    ) -> str:
        """Returns the path of a new file; it may take the name of the file that it replaces (``own``), and no other."""
        callback = self._callback
        path = callback.format_checkpoint_name(metrics, filename)
        version = callback.STARTING_VERSION
        while callback.enable_version_counter and path != own and callback.file_exists(path, trainer):
            path = callback.format_checkpoint_name(metrics, filename, ver=version)
            version += 1
        callback._named |= {path}
        return path

    def save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Writes a checkpoint at ``filepath``, in the foreground, and notifies the loggers."""
        callback = self._callback
        callback._settle(trainer)
        path = storage.normalized(filepath)
        kept = callback._adopted()
        files = tuple(file for file in kept.files if file != path)
        if path != kept.last:  # no score replaces the ``save_last`` file, only the next one does
            files = (*files, path)
        after = replace(kept, files=files)
        callback._write(trainer, SavePlan(target=path, after=after))
        callback._adopt(files=files)
        callback._named |= {path}
        callback._foreign -= {path}
        callback._saved_step = trainer.global_step
        callback._last_checkpoint_saved = str(filepath)
        trainer.delivery.after_save_checkpoint(callback)

    def should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Returns whether ``previous`` is removed, now that ``current`` is written.

        Files of another run, the file that this run resumed from, and files in another folder are kept.
        """
        callback = self._callback
        if previous == current or previous in callback._foreign:
            return False
        if trainer.ckpt_path and storage.normalized(previous) == storage.normalized(trainer.ckpt_path):
            return False
        return storage.is_remote(previous) or storage.is_within(storage.normalized(previous), callback.dirpath or "")

    def remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Removes a file that this callback has written.

        Raises :class:`ConfigError` for any other file.  Keeps a file that a checkpoint names and another run wrote, and the file
        that this run resumed from; a log line says so.
        """
        callback = self._callback
        callback._settle(trainer)
        path = storage.normalized(filepath)
        resumed_from = storage.normalized(trainer.ckpt_path) if trainer.ckpt_path else ""
        if path in callback._foreign or path == resumed_from:
            if trainer.is_global_zero:
                _LOG.warning("%s stays: another run wrote it, or this run was resumed from it", path)
            return
        trainer.strategy.on_rank_zero(lambda: self._remove_own(path))
        kept = callback._adopted()
        last = "" if kept.last == path else kept.last
        callback._adopt(files=tuple(file for file in kept.files if file != path), last=last)
        callback._named -= {path}

    def _remove_own(self, path: str) -> None:
        callback = self._callback
        if not self._wrote(path) and (storage.exists(path) or callback._io is not None):
            raise ConfigError(
                f"{type(callback).__name__}._remove_checkpoint({path!r}): this callback did not write that file, and removes only "
                "its own; remove other files in your method, with os.remove"
            )
        if callback._io is not None:
            remove_by(callback._io, path)
            return
        is_foreign_folder = not storage.is_remote(path) and Path(path).is_dir() and not storage.is_folder(path)
        if path in callback._named and is_foreign_folder:
            shutil.rmtree(path)  # a folder that an overridden _save_checkpoint has made, as save_pretrained does
            return
        SavePlan(remove=(path,)).rotate()

    def _wrote(self, path: str) -> bool:
        """Returns whether this callback wrote the file at ``path``, in this process or in an earlier one of the same training."""
        callback = self._callback
        kept = callback._kept
        if path in callback._named or path in {*kept.files, kept.last, kept.spare} - callback._foreign:
            return True
        try:
            attempt = read_header(path, callback._io).get(WRITTEN_BY)
        except CheckpointError:
            return False
        return attempt is not None and attempt in {callback._lineage.attempt, *callback._lineage.earlier}
