"""Lightning's methods of a ModelCheckpoint, for subclasses that override or call them.

A class without an override saves by a :class:`~fabricamp.callbacks._checkpoint_files.SavePlan`, and these methods are not called.
With an override, a save is these calls, on every rank, as in Lightning::

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

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from fabricamp._utils import lightning_alias
from fabricamp.callbacks._checkpoint_files import (
    WRITTEN_BY,
    FileNameTemplate,
    KeptFiles,
    Lineage,
    SavePlan,
    sort_key,
    template_of,
)
from fabricamp.callbacks._monitoring import checks_at_train_epoch_end, metric_tensors
from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.checkpoint import link_checkpoint, read_header, storage
from fabricamp.checkpoint.checkpoint_io import remove_by
from fabricamp.errors import CheckpointError, ConfigError
from fabricamp.metrics.values import number_tensor

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from datetime import timedelta

    from fabricamp._utils.types import CheckpointFiles
    from fabricamp.trainer import Trainer

_LOG = logging.getLogger("fabricamp")

_STEPS_OF_A_SAVE: Final = (
    "_get_metric_interpolated_filepath_name",
    "_link_checkpoint",
    "_monitor_candidates",
    "_remove_checkpoint",
    "_save_checkpoint",
    "_save_last_checkpoint",
    "_save_monitor_checkpoint",
    "_save_none_monitor_checkpoint",
    "_save_topk_checkpoint",
    "_should_remove_checkpoint",
    "_should_skip_saving_checkpoint",
    "_update_best_and_save",
    "check_monitor_top_k",
    "file_exists",
)
"""A class that overrides one of these saves by these methods."""


class RotationMethods(Checkpoint):
    """The base of :class:`ModelCheckpoint` with Lightning's methods; it holds the state that they change."""

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    dirpath: str | None
    filename: str | None
    monitor: str | None
    mode: Literal["min", "max"]
    verbose: bool
    save_last: bool | Literal["link"] | None
    save_top_k: int
    save_on_exception: bool
    auto_insert_metric_name: bool
    enable_version_counter: bool
    every_n_train_steps: int
    every_n_epochs: int
    train_time_interval: timedelta | None

    _kept: KeptFiles
    _foreign: frozenset[str]
    _lineage: Lineage
    _saved_step: int
    _save_on_train_epoch_end: bool | None

    _waits = False
    """Whether a save that was due is left to the next validation."""
    _last_checkpoint_saved = ""
    """Path of the file that was written last in this process."""

    # A pickle of an earlier version has none of these.
    _models: dict[str, Tensor] | None = None  # what ``best_k_models`` returned; an override may have changed it
    _models_of: KeptFiles | None = None  # the kept files from which it was made
    _assigned: Mapping[str, Any] = {}  # values of an override that do not follow from the files
    _named: frozenset[str] = frozenset()  # paths that this callback has chosen for its files in this process
    _rotating = False  # a save by these methods is in progress
    _io: CheckpointFiles | None = None
    """The plug-in that writes the files; it can write, load and remove, but not copy and rename, so these methods save."""

    # -- what users read, and overrides assign -----------------------------------------------------------------------------------

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Paths of the top k files, best first, mapped to their ``monitor`` values.

        Changes of the dict are this callback's state in a subclass, or in a program written for Lightning; otherwise it is a copy.
        """
        return self._shared_models if self._shares_models else dict(self._shared_models)

    @best_k_models.setter
    def best_k_models(self, models: dict[str, Tensor]) -> None:
        self._models = models
        self._models_of = self._kept

    @property
    def best_model_path(self) -> str:
        """Path of the file with the best ``monitor``; without a monitor, of the newest file."""
        return self._kept.best

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._adopt(best=str(path))

    @property
    def best_model_score(self) -> Tensor | None:
        """The ``monitor`` value of ``best_model_path``."""
        if "best_model_score" in self._assigned:
            return self._assigned["best_model_score"]  # type: ignore[no-any-return]  # what an override has assigned
        score = self._kept.scores.get(self._kept.best)
        return None if score is None else number_tensor(score)

    @best_model_score.setter
    def best_model_score(self, score: Tensor | None) -> None:
        self._assigned = {**self._assigned, "best_model_score": score}

    @property
    def current_score(self) -> Tensor | None:
        """The ``monitor`` value of the file that was ranked last."""
        score = self._kept.current
        return None if score is None else number_tensor(score)

    @current_score.setter
    def current_score(self, score: Tensor | float | None) -> None:
        self._adopt(current=None if score is None else float(score))

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst file in the top k, the next to be replaced; empty while fewer than k files are kept."""
        assigned = str(self._assigned.get("kth_best_model_path", ""))
        # A resumed run may know other files than the checkpoint that named this one.
        return assigned if assigned in self.best_k_models else self._kept.worst(self.save_top_k)

    @kth_best_model_path.setter
    def kth_best_model_path(self, path: str) -> None:
        self._assigned = {**self._assigned, "kth_best_model_path": path}

    @property
    def kth_value(self) -> Tensor:
        """The ``monitor`` value of ``kth_best_model_path``; while there is none, an infinite value that any file is better than."""
        if "kth_value" in self._assigned:
            return self._assigned["kth_value"]  # type: ignore[no-any-return]  # what an override has assigned
        score = self._kept.scores.get(self.kth_best_model_path)
        if score is None:
            score = float("inf" if self.mode == "min" else "-inf")
        return number_tensor(score)

    @kth_value.setter
    def kth_value(self, value: Tensor) -> None:
        self._assigned = {**self._assigned, "kth_value": value}

    @property
    def last_model_path(self) -> str:
        """Path of the ``save_last`` file, or of the file written at Ctrl-C or an exception."""
        return self._kept.last

    @last_model_path.setter
    def last_model_path(self, path: str) -> None:
        self._adopt(last=str(path))

    # -- Lightning's names of what this callback counts --------------------------------------------------------------------------

    @property
    def _last_global_step_saved(self) -> int:
        return self._saved_step

    @_last_global_step_saved.setter
    def _last_global_step_saved(self, step: int) -> None:
        self._saved_step = step

    @property
    def _defer_save_until_validation(self) -> bool:
        return self._waits

    @_defer_save_until_validation.setter
    def _defer_save_until_validation(self, waits: bool) -> None:
        self._waits = waits

    @property
    def _enable_version_counter(self) -> bool:
        return self.enable_version_counter

    @_enable_version_counter.setter
    def _enable_version_counter(self, enabled: bool) -> None:
        self.enable_version_counter = enabled

    @property
    def _every_n_train_steps(self) -> int:
        return self.every_n_train_steps

    @property
    def _every_n_epochs(self) -> int:
        return self.every_n_epochs

    @property
    def _train_time_interval(self) -> timedelta | None:
        return self.train_time_interval

    @property
    def _fs(self) -> storage.FileSystem:
        """The file system of ``dirpath``."""
        return storage.filesystem_of(self.dirpath or "")[0]

    # -- the state of these attributes -------------------------------------------------------------------------------------------

    @property
    def _shared_models(self) -> dict[str, Tensor]:
        """The dict that ``best_k_models`` returns; the callback adopts changes that a program makes in it."""
        if self._models is None or self._models_of is not self._kept:
            scores = self._kept.scores.items()
            self._models = {path: number_tensor(score) for path, score in scores}
            self._models_of = self._kept
        return self._models

    @property
    def _shares_models(self) -> bool:
        """Whether changes of the dict are adopted; otherwise a file that a native program drops from the dict would be removed."""
        is_own = type(self).__module__.startswith("fabricamp.")
        return not is_own or self._saves_by_methods or lightning_alias.is_installed()

    def _adopted(self) -> KeptFiles:
        """Returns the kept files, with the changes that were made in the dict of ``best_k_models``."""
        kept = self._kept
        if self._models is None or self._models_of is not kept:
            return kept
        found: dict[str, float] = {}
        for path, value in self._models.items():
            known = kept.scores.get(path)
            # The dict has most values in fp32; a value that was not changed keeps its digits.
            unchanged = known is not None and bool(number_tensor(known) == float(value))
            found[str(path)] = known if unchanged and known is not None else float(value)
        if found == kept.scores:
            return kept
        ranked = sorted(found.items(), key=lambda item: sort_key(item[1], self.mode))
        return replace(kept, scores=dict(ranked))

    def _adopt(self, **changes: Any) -> None:
        """Stores assigned values as the callback's state; ``best_k_models`` stays the same dict."""
        models = self._shared_models
        self._kept = replace(self._adopted(), **changes)
        self._models = models
        self._models_of = self._kept

    @property
    def _saves_by_methods(self) -> bool:
        """Whether a method that makes a save is overridden, in the class or on the object, or a plug-in writes the files."""
        return self._io is not None or any(
            name in vars(self) or getattr(type(self), name) is not getattr(RotationMethods, name)
            for name in _STEPS_OF_A_SAVE
        )

    # -- the occasions of a save -------------------------------------------------------------------------------------------------

    def _save_at_step(self, trainer: Trainer) -> None:
        """Saves because steps or minutes have passed, or because such a save has waited for its validation."""
        if not self._should_skip_saving_checkpoint(trainer):
            candidates = self._shared_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _save_at_epoch_end(self, trainer: Trainer) -> None:
        """Saves if the epoch is due; the ``save_last`` file is made only beside another one."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._shared_candidates(trainer)
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save_topk_checkpoint(trainer, candidates)
        links = self.save_last == "link" and bool(self._last_checkpoint_saved)
        if links or self._last_global_step_saved == trainer.global_step:
            self._save_last_checkpoint(trainer, candidates)

    def _save_at_exception(self, trainer: Trainer) -> None:
        """Saves the step at which an exception has ended training, whatever its score."""
        candidates = self._shared_candidates(trainer)
        path = self._get_metric_interpolated_filepath_name(candidates, trainer)
        self._save_checkpoint(trainer, path)
        if self.save_last:
            self._save_last_checkpoint(trainer, candidates)
        else:
            self.last_model_path = path

    def _shared_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Returns rank 0's metrics on every rank: all ranks choose the same names and the same top k."""
        return trainer.strategy.broadcast(self._monitor_candidates(trainer))

    def _metrics(self, trainer: Trainer) -> dict[str, Tensor | float]:
        return {**trainer.monitored_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def _check_monitor(self, trainer: Trainer, *, ranked: bool) -> None:
        raise NotImplementedError

    def _write_file(self, trainer: Trainer, plan: SavePlan) -> None:
        raise NotImplementedError

    def _settle(self, trainer: Trainer) -> None:
        """Waits for a write in flight; only :class:`AsyncCheckpoint` has one."""

    # -- Lightning's methods -----------------------------------------------------------------------------------------------------

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        """Returns whether nothing is saved now: a trial run, no fit (as in a sanity check), or a step that is saved already."""
        saves_now = trainer.state.fitting and not trainer.fast_dev_run
        return not saves_now or self._last_global_step_saved == trainer.global_step

    def _should_save_on_exception(self, trainer: Trainer) -> bool:
        """Returns whether ``save_on_exception`` asks for a file of this step."""
        return self.save_on_exception and trainer.state.fitting and not trainer.fast_dev_run

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        """Returns whether files are saved at the end of the train epoch, not after validation."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        return checks_at_train_epoch_end(trainer)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Returns the metrics by which files are ranked and named, with ``epoch`` and ``step`` as whole numbers."""
        counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        whole = {name: torch.tensor(count, dtype=torch.int32, device="cpu") for name, count in counts.items()}
        return {**metric_tensors(self._metrics(trainer)), **whole}

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves one file by its score, or without a monitor the newest."""
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        if self.monitor not in monitor_candidates:
            self._check_monitor(trainer, ranked=True)
        self._save_monitor_checkpoint(trainer, monitor_candidates)

    def _save_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves a file if its score is among the top k."""
        current = monitor_candidates.get(str(self.monitor))
        if self.check_monitor_top_k(trainer, current):
            assert current is not None
            self._update_best_and_save(current, trainer, monitor_candidates)
        elif self.verbose and trainer.is_global_zero:
            step = int(monitor_candidates["step"])
            _LOG.info("%s: step %d is not among the top %d", type(self).__name__, step, self.save_top_k)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Returns whether a file with the score ``current`` would be among the top k; the same on every rank."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        worst = self.best_k_models.get(self.kth_best_model_path, self.kth_value)
        better = torch.lt if self.mode == "min" else torch.gt
        return trainer.strategy.reduce_boolean_decision(bool(better(current, worst.to(current.device))))

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Puts a file with the score ``current`` into the top k, writes it, and removes the file that it replaces."""
        models = self._shared_models
        k = len(models) + 1 if self.save_top_k == -1 else self.save_top_k
        replaced = ""
        if 0 < k == len(models):
            replaced = self.kth_best_model_path
            models.pop(replaced)
        if torch.isnan(current):
            current = torch.full_like(current, float("inf" if self.mode == "min" else "-inf"))
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced or None)
        models = self._shared_models
        models[path] = current
        self.current_score = current
        worst_of, best_of = (max, min) if self.mode == "min" else (min, max)
        if len(models) == k:
            self.kth_best_model_path = worst_of(models, key=lambda one: float(models[one]))
            self.kth_value = models[self.kth_best_model_path]
        self.best_model_path = best_of(models, key=lambda one: float(models[one]))
        self.best_model_score = models[self.best_model_path]
        self._save_checkpoint(trainer, path)
        if replaced and self._should_remove_checkpoint(trainer, replaced, path):
            self._remove_checkpoint(trainer, replaced)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Saves the newest file; with ``save_top_k=1`` removes the one before it."""
        previous = self.best_model_path
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, previous)
        self.best_model_path = path
        self._save_checkpoint(trainer, path)
        if self.save_top_k == 1 and previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Writes the ``save_last`` file, or makes it a link to the newest one; removes the previous one of another name."""
        if not self.save_last:
            return
        previous = self.last_model_path
        path = self._free_name(monitor_candidates, trainer, previous, self.CHECKPOINT_NAME_LAST)
        self.last_model_path = path
        newest = self._last_checkpoint_saved
        if self.save_last == "link" and newest and self.save_top_k != 0:
            self._link_checkpoint(trainer, newest, path)
        else:
            self._save_checkpoint(trainer, path)
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._remove_checkpoint(trainer, previous)

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: Trainer, del_filepath: str | None = None
    ) -> str:
        """Returns the path of a new file; it may take the name of the file that it replaces (``del_filepath``), and no other."""
        return self._free_name(monitor_candidates, trainer, del_filepath, None)

    def _free_name(self, metrics: dict[str, Tensor], trainer: Trainer, own: str | None, filename: str | None) -> str:
        path = self.format_checkpoint_name(metrics, filename)
        version = self.STARTING_VERSION
        while self.enable_version_counter and path != own and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(metrics, filename, ver=version)
            version += 1
        self._named |= {path}
        return path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Returns on every rank whether rank 0 sees a file of this name."""
        return trainer.strategy.on_rank_zero(lambda: storage.exists(storage.normalized(filepath)))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Writes a checkpoint at ``filepath``, in the foreground, and notifies the loggers."""
        self._settle(trainer)
        path = storage.normalized(filepath)
        kept = self._adopted()
        files = tuple(file for file in kept.files if file != path)
        if path != kept.last:  # rotation never removes the ``save_last`` file
            files = (*files, path)
        after = replace(kept, files=files)
        self._write_file(trainer, SavePlan(target=path, after=after))
        self._adopt(files=files)
        self._named |= {path}
        self._foreign -= {path}
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = str(filepath)
        trainer.delivery.after_save_checkpoint(self)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Makes ``linkpath`` a symbolic link to ``filepath``."""
        if storage.normalized(filepath) != storage.normalized(linkpath):
            trainer.strategy.on_rank_zero(lambda: link_checkpoint(filepath, linkpath))

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Returns whether ``previous`` is removed, now that ``current`` is written.

        Files of another run, the file that this run resumed from, and files in another folder are kept.
        """
        if previous == current or previous in self._foreign:
            return False
        if trainer.ckpt_path and storage.normalized(previous) == storage.normalized(trainer.ckpt_path):
            return False
        return storage.is_remote(previous) or storage.is_within(storage.normalized(previous), self.dirpath or "")

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Removes a file that this callback has written.

        Raises :class:`ConfigError` for any other file.  Keeps a file that a checkpoint names and another run wrote, and the file
        that this run resumed from; a log line says so.
        """
        self._settle(trainer)
        path = storage.normalized(filepath)
        resumed_from = storage.normalized(trainer.ckpt_path) if trainer.ckpt_path else ""
        if path in self._foreign or path == resumed_from:
            if trainer.is_global_zero:
                _LOG.warning("%s stays: another run wrote it, or this run was resumed from it", path)
            return
        trainer.strategy.on_rank_zero(lambda: self._remove_own(path))
        kept = self._adopted()
        last = "" if kept.last == path else kept.last
        self._adopt(files=tuple(file for file in kept.files if file != path), last=last)
        self._named -= {path}

    def _remove_own(self, path: str) -> None:
        if not self._wrote(path) and (storage.exists(path) or self._io is not None):
            raise ConfigError(
                f"{type(self).__name__}._remove_checkpoint({path!r}): this callback did not write that file, and removes only its "
                "own; remove other files in your method, with os.remove"
            )
        if self._io is not None:
            remove_by(self._io, path)
            return
        if path in self._named and not storage.is_remote(path) and Path(path).is_dir() and not storage.is_folder(path):
            shutil.rmtree(path)  # a folder that an overridden _save_checkpoint has made, as save_pretrained does
            return
        SavePlan(remove=(path,)).rotate()

    def _wrote(self, path: str) -> bool:
        """Returns whether this callback wrote the file at ``path``, in this process or in an earlier one of the same training."""
        kept = self._kept
        if path in self._named or path in {*kept.files, kept.last, kept.spare} - self._foreign:
            return True
        try:
            attempt = read_header(path, self._io).get(WRITTEN_BY)
        except CheckpointError:
            return False
        return attempt is not None and attempt in {self._lineage.attempt, *self._lineage.earlier}

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Returns the ``save_last`` files in the folder, with and without a version."""
        if not self.dirpath:
            return set()
        start = storage.join(self.dirpath, self.CHECKPOINT_NAME_LAST)
        return {path for path in storage.files_in(self.dirpath, self.FILE_EXTENSION) if path.startswith(start)}

    def found_last_checkpoints(self, trainer: Trainer) -> list[str]:
        """Returns what an overridden ``_find_last_checkpoints`` finds; without an override nothing."""
        own = RotationMethods._find_last_checkpoints
        overridden = "_find_last_checkpoints" in vars(self) or type(self)._find_last_checkpoints is not own
        return sorted(self._find_last_checkpoints(trainer)) if overridden else []

    # -- names of files, and the list of them ------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Tensor | float],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Returns the path of a checkpoint with these metrics, in ``dirpath`` once ``dirpath`` is known."""
        name = self._format_checkpoint_name(
            filename or self.filename, metrics, prefix, auto_insert_metric_name=self.auto_insert_metric_name
        )
        version = "" if ver is None else f"{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        return storage.join(self.dirpath or "", f"{name}{version}{self.FILE_EXTENSION}")

    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: Mapping[str, Tensor | float],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        """Returns the name of a checkpoint with these metrics, without folder, version and extension."""
        equals = self.CHECKPOINT_EQUALS_CHAR if auto_insert_metric_name else None
        name = self._template(filename).fill(metrics, equals)
        return name if prefix is None else f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{name}"

    def _template(self, filename: str | None) -> FileNameTemplate:
        return template_of(filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}")

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Writes ``best_k_models`` to a YAML file, by default ``best_k_models.yaml`` in ``dirpath``."""
        import yaml

        path = (
            storage.join(self.dirpath or "", "best_k_models.yaml") if filepath is None else storage.normalized(filepath)
        )
        filesystem, place = storage.filesystem_of(path)
        with filesystem.open(place, "w") as file:
            yaml.dump({name: float(score) for name, score in self.best_k_models.items()}, file)
