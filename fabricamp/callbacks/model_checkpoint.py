"""Writes checkpoints during training and removes those that are not needed any more.

In order: the arguments, the paths that users read, the callback's own state, the start of a run, when a save is due, how a file is
written, its name, and the checks of the arguments.  What a save does is in ``_rotation``; which files stay, their names and their
owners are in ``_checkpoint_files``; steps and minutes are counted by ``arguments/cadence``.
"""

from __future__ import annotations

import dataclasses
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from torch import Tensor

from fabricamp.arguments.cadence import Cadence, Every, parse_every
from fabricamp.arguments.checks import check_kind
from fabricamp.arguments.not_offered import is_lightnings
from fabricamp.callbacks._checkpoint_files import (
    WRITTEN_BY,
    FileNameTemplate,
    KeptFiles,
    Lineage,
    SavePlan,
    files_beside,
    find_own_files,
    planner_of,
    template_of,
    trusted_folders,
)
from fabricamp.callbacks._monitoring import checks_at_train_epoch_end, has_validation, missing_monitor
from fabricamp.callbacks._overridable_save import OverridableSave
from fabricamp.callbacks._rotation import PlannedRotation
from fabricamp.callbacks.base import ends_everywhere
from fabricamp.checkpoint import storage
from fabricamp.checkpoint.checkpoint_io import writes_own_files
from fabricamp.errors import ConfigError
from fabricamp.habits import habits
from fabricamp.metrics.values import number_tensor

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from fabricamp._utils.types import AnyBatch, AnyOutput, CheckpointFiles, StateDict
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_ASSIGNED: Final = ("best_model_score", "kth_best_model_path", "kth_value")
"""Keys of Lightning's state that follow from the files here, unless an override assigns them."""
_WRITE_THE_SAME: Final = {"ModelCheckpoint": "AsyncCheckpoint", "AsyncCheckpoint": "ModelCheckpoint"}
"""Names of classes, each with that of the class which writes the same files and has the same state."""


class ModelCheckpoint(OverridableSave):
    """Writes a checkpoint every n steps, epochs or minutes, and keeps the ``save_top_k`` best by ``monitor``.

    The two newest files are always kept, so ``save_top_k=1`` leaves one extra file.  Files of another run are never removed.
    Ctrl-C and ``nan_policy="stop"`` write a checkpoint of the step at which they end training.

    Args:
        dirpath: the folder, or a URL that fsspec opens (``s3://bucket/run``); None is ``checkpoints`` in the logger's folder.
        filename: the file name; it may contain metrics, as in ``"{epoch}-{val_loss:.2f}"``; an unlogged metric is written as 0.
        monitor: the logged metric that ranks the files; None keeps the newest.  A save by steps is made after the validation of its
            step if there is one, unless files are saved at the end of the train epoch.
        verbose: logs a line for each file.
        save_last: True also writes the newest checkpoint as ``last.ckpt``, and keeps the previous one until the next save, if no
            other file has its content: as ``last-previous.ckpt``, or as ``last-previous-v1.ckpt`` if an older one has that name.
            "link" makes ``last.ckpt`` a symbolic link to the newest file.
        save_top_k: number of best files to keep; -1 keeps all, 0 none; without ``monitor`` only 1, 0 or -1.
        save_on_exception: also writes a checkpoint at an exception (one process only).  The file may contain a half-finished step,
            validation or hook; a run that resumes from it warns that it may differ from a run without the exception.
        save_weights_only: saves only the weights; a run cannot resume from such a file.
        mode: "min" or "max": which value of ``monitor`` is better.
        auto_insert_metric_name: writes ``epoch=1`` and not ``1`` for ``{epoch}``.
        every_n_train_steps: Lightning's form of ``every="n steps"``.
        train_time_interval: Lightning's form of ``every="n min"``: a timedelta.
        every_n_epochs: Lightning's form of ``every="n epochs"``; 1 if nothing is given.
        save_on_train_epoch_end: saves at the end of the train epoch (True) or after validation (False); None: at the train epoch's
            end if all metrics are logged by then, else after validation.
        enable_version_counter: adds ``-v1`` to a name that exists; False: replaces the file.
        every: the schedule in words: any of steps, epochs and a time, as in "100 steps, 1 epoch, 30 min".
        trainable_only: leaves frozen parameters out of the files (LoRA, a frozen backbone): they stay as the module's constructor
            makes them.  A run resumes from such a file, and a load checks that they are the same; they may be in another dtype.
            Parameters that were trained before are saved, frozen or not, and so are buffers.

    Example:
        >>> checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=3, save_last=True, filename="{epoch}-{val_loss:.2f}")
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    monitors: ClassVar[bool] = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        every: str | None = None,
        trainable_only: bool = False,
    ) -> None:
        super().__init__()
        check_kind(self, "a path", optional=True, dirpath=dirpath)
        check_kind(self, "a string", optional=True, filename=filename, monitor=monitor, every=every)
        check_kind(self, "a whole number", save_top_k=save_top_k)
        steps_and_epochs = {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs}
        check_kind(self, "a whole number", optional=True, **steps_and_epochs)
        check_kind(self, "True or False", save_weights_only=save_weights_only, save_on_exception=save_on_exception)
        check_kind(self, "True or False", trainable_only=trainable_only)
        names = {"auto_insert_metric_name": auto_insert_metric_name, "enable_version_counter": enable_version_counter}
        check_kind(self, "True or False", **names)
        check_kind(self, "True or False", optional=True, save_on_train_epoch_end=save_on_train_epoch_end)
        self.dirpath = None if dirpath is None else storage.normalized(dirpath)
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.mode = mode
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.enable_version_counter = enable_version_counter
        self.every = every
        self.trainable_only = trainable_only
        self.every_n_train_steps, self.every_n_epochs, self.train_time_interval = _chosen_cadence(
            every, every_n_train_steps, every_n_epochs, train_time_interval
        )
        self._check_arguments()
        self._cadence = Cadence(self.every_n_train_steps, self.train_time_interval)
        self.dirpath_given = dirpath is not None
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._kept = KeptFiles()
        self._models: dict[str, Tensor] = {}  # what ``best_k_models`` returned; a program may have changed it
        self._models_of: KeptFiles | None = None  # the kept files from which it was made
        self._assigned: Mapping[str, Any] = {}  # values of a program that do not follow from the files
        self._lineage = Lineage()
        self._foreign: frozenset[str] = frozenset()  # kept files that another run wrote
        self._restored = False  # since the last start of training
        self._followed: tuple[str, ...] = ()  # folders in which file names from a checkpoint are accepted
        self._io: CheckpointFiles | None = None  # the plug-in that writes the files
        self._writing: KeptFiles | None = None  # the kept files after the write that is in progress
        self._waits = False  # a save that was due is left to the next validation
        self._last_checkpoint_saved = ""  # the file that was written last in this process
        # The last step saved and ranked by its metrics.  A file that a signal left is not ranked, so a run resumed from that file
        # must still rank the step.
        self._judged_step = -1
        self._start_at(0)

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

    def known_files(self) -> set[str]:
        """Returns the paths of all files that this callback keeps."""
        return self._adopted().all()

    def found_last_checkpoints(self, trainer: Trainer) -> list[str]:
        """Returns what an overridden ``_find_last_checkpoints`` finds; without an override nothing."""
        own = ModelCheckpoint._find_last_checkpoints
        overridden = "_find_last_checkpoints" in vars(self) or type(self)._find_last_checkpoints is not own
        return sorted(self._find_last_checkpoints(trainer)) if overridden else []

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Returns the ``save_last`` files in the folder, with and without a version."""
        if not self.dirpath:
            return set()
        start = storage.join(self.dirpath, self.CHECKPOINT_NAME_LAST)
        return {path for path in storage.files_in(self.dirpath, self.FILE_EXTENSION) if path.startswith(start)}

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Writes ``best_k_models`` to a YAML file, by default ``best_k_models.yaml`` in ``dirpath``."""
        import yaml

        path = (
            storage.join(self.dirpath or "", "best_k_models.yaml") if filepath is None else storage.normalized(filepath)
        )
        filesystem, place = storage.filesystem_of(path)
        with filesystem.open(place, "w") as file:
            yaml.dump({name: float(score) for name, score in self.best_k_models.items()}, file)

    @property
    def _shared_models(self) -> dict[str, Tensor]:
        """The dict that ``best_k_models`` returns; the callback adopts changes that a program makes in it."""
        if self._models_of is not self._kept:
            self._models = self._kept.shown()
            self._models_of = self._kept
        return self._models

    def _adopted(self) -> KeptFiles:
        """Returns the kept files, with the changes that were made in the dict of ``best_k_models``."""
        return self._kept.edited(self._models, self.mode) if self._models_of is self._kept else self._kept

    def _adopt(self, **changes: Any) -> None:
        """Stores assigned values as the callback's state; ``best_k_models`` stays the same dict."""
        self._models = self._shared_models
        self._kept = dataclasses.replace(self._adopted(), **changes)
        self._models_of = self._kept

    @property
    def state_key(self) -> str:
        """The key of this callback's state; contains monitor, mode, filename and cadence.

        In a program written for Lightning it is Lightning's, without the filename.
        """
        if habits().state_key_without_filename:
            return self._lightnings_key
        lengths = ", ".join(str(length) for length in self._lengths.values() if length not in (0, None))
        return f"{self._kind} every {lengths or '0'}"

    def accepts_state_of(self, key: str) -> bool:
        """Also accepts the state of a run with the same kind of cadence and another length, and Lightning's key.

        ModelCheckpoint and AsyncCheckpoint, which differ in when they write, accept each other's.
        """
        own = type(self).__qualname__
        other = _WRITE_THE_SAME.get(own, own)
        if key.startswith(f"{other}{{"):
            key = own + key.removeprefix(other)
        return key in (self._kind, self._lightnings_key) or key.startswith(f"{self._kind} every ")

    @property
    def _lightnings_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=self.train_time_interval,
        )

    @property
    def _lengths(self) -> dict[str, Any]:
        return {"steps": self.every_n_train_steps, "time": self.train_time_interval, "epochs": self.every_n_epochs}

    @property
    def _kind(self) -> str:
        cadence = "+".join(unit for unit, length in self._lengths.items() if length not in (0, None)) or "epochs"
        about = {"monitor": self.monitor, "mode": self.mode, "cadence": cadence, "filename": self.filename}
        return f"{type(self).__qualname__}{about}"

    def state_dict(self) -> StateDict:
        """Returns the kept files; a checkpoint that is being written is already among the files in its own state."""
        kept = self._writing or self._adopted()
        return {
            "dirpath": self.dirpath,
            "judged_step": self._judged_step,
            **kept.state_dict(),
            **self._lineage.state_dict(),
            **({"waits_for_validation": True} if self._waits else {}),
            **self._assigned,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restores the files that are in ``dirpath`` or in the checkpoint's folder; removes only files that this callback wrote."""
        self.dirpath = self.dirpath or state_dict["dirpath"]
        self._judged_step = int(state_dict.get("judged_step", -1))
        self._waits = bool(state_dict.get("waits_for_validation"))
        kept = KeptFiles.from_state_dict(state_dict)
        self._kept = kept.without({path for path in kept.all() if not self._trusts(path)})
        self._foreign = frozenset(kept.all())  # until training starts and the files' headers are read
        self._lineage = Lineage.from_state_dict(state_dict)
        if self._calls_methods:
            self._assigned = {key: state_dict[key] for key in _ASSIGNED if state_dict.get(key) is not None}
        self._restored = True

    def _trusts(self, path: str) -> bool:
        """Returns whether a path from a checkpoint has this callback's extension and is in a folder of this run."""
        if not self._followed:  # no run has begun: nothing is opened or removed yet
            return True
        if not path.endswith(self.FILE_EXTENSION):
            return False
        any_folder = self._io is not None
        return any(storage.resolves_within(path, folder, any_folder=any_folder) for folder in self._followed)

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Chooses the folder, the same on every rank."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if self.trainable_only:
            self._refuse_averages(trainer)
        self._judged_step = -1
        self._waits = False
        io = trainer.strategy.checkpoint_io
        self._io = None if writes_own_files(io) else io
        if self.save_on_exception and trainer.world_size > 1:
            raise ConfigError(
                f"ModelCheckpoint(save_on_exception=True) with {trainer.world_size} processes: the rank that raised cannot gather "
                "the others' state; use every_n_train_steps or train_time_interval instead"
            )
        if not self.dirpath_given:
            self.dirpath = storage.join(trainer.log_folder or trainer.root_folder, "checkpoints")
        self.dirpath = trainer.strategy.on_rank_zero(lambda: self._writable_folder(trainer))
        self._followed = trusted_folders(trainer, self, trainer.ckpt_path or "")

    def _refuse_averages(self, trainer: Trainer) -> None:
        """Raises :class:`ConfigError` for a callback that averages: its average has all weights, and needs them at a resume."""
        for callback in trainer.callbacks:
            if getattr(callback, "averages_weights", False):
                raise ConfigError(
                    f"{type(self).__name__}(trainable_only=True) with {type(callback).__name__}, whose average has all weights: "
                    "leave one of them out"
                )

    def _writable_folder(self, trainer: Trainer) -> str | None:
        """Returns the folder; raises :class:`ConfigError` if nothing can be written there."""
        if not trainer.fast_dev_run and (problem := storage.why_not_writable(self.dirpath or "")):
            raise ConfigError(f"ModelCheckpoint(dirpath={self.dirpath!r}): {problem}; choose another folder")
        return self.dirpath

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Starts counting at the current step; the initial state is not saved."""
        if trainer.fast_dev_run:  # saves nothing, and removes nothing that earlier runs left
            return
        self._kept, self._foreign, self._lineage = trainer.strategy.on_rank_zero(lambda: self._files_at_start(trainer))
        self._restored = False
        self._start_at(trainer.global_step)

    def _files_at_start(self, trainer: Trainer) -> tuple[KeptFiles, frozenset[str], Lineage]:
        """Returns the known files, those among them that this callback did not write, and the lineage with a new attempt."""
        # A second fit in this process continues after all files of the first; a resumed fit continues at the checkpoint's step.
        resumed_from = trainer.global_step if trainer.ckpt_path else sys.maxsize
        lineage = self._lineage.next_attempt(resumed_from)
        if not self._restored:
            return self._kept, self._foreign, lineage
        files = files_beside(trainer, self)
        kept, foreign, lineage = find_own_files(
            self._kept, lineage, files, self._trusts, trainer.strategy.checkpoint_io
        )
        if self._io is not None:
            return kept, foreign, lineage  # a plug-in need not write local files, so there is nothing to list
        return planner_of(trainer, self, foreign).remove_leftovers(kept), foreign, lineage

    def _start_at(self, step: int) -> None:
        self._saved_step = step
        self._metrics_complete = False
        self._validated = False
        self._unjudged = False  # a save was made before ``monitor`` was logged
        self._told_of_zeros = False
        self._cadence.start(step)

    def holds_at(self, global_step: int) -> float:
        """Returns the next step at which a save may be due."""
        return max(self._cadence.next_look, global_step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Saves if the interval of steps or time has passed."""
        step = trainer.global_step
        cadence = self._cadence
        if step >= cadence.next_look and cadence.is_due(step, trainer.strategy):
            trainer.reduce_step_metrics()  # the file is ranked by this step's values
            if self._leaves_to_validation(trainer):
                self._waits = True
            else:
                self._rotation.at_step(trainer)

    def _leaves_to_validation(self, trainer: Trainer) -> bool:
        """Returns whether a save that is due is made after the validation of this step, which may log ``monitor``, as in Lightning.

        Before ``monitor`` was first logged the file cannot be ranked; the next validation then saves once more.
        """
        if self.monitor is None or self._should_save_on_train_epoch_end(trainer):
            return False
        self._waits = self._waits or self.monitor not in self._metrics(trainer)
        return trainer.validation_follows

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Saves, unless this callback saves at the end of the train epoch."""
        if not trainer.state.fitting:
            return
        self._validated = True
        if self._should_save_on_train_epoch_end(trainer):
            return
        waited = self._waits
        self._waits = False
        if waited:
            self._rotation.at_step(trainer)
        else:
            self._rotation.at_epoch_end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Saves, unless this callback saves after validation; from now on a missing ``monitor`` is an error."""
        self._metrics_complete = self._validated or not has_validation(trainer)
        if self._should_save_on_train_epoch_end(trainer):
            self._rotation.at_epoch_end(trainer)
        if self._metrics_complete and self._unjudged:
            self._unjudged = False
            self._check_monitor(trainer, ranked=True)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Writes the ``save_last`` file if training ended before any save was due."""
        if self.save_last and not self._kept.last:
            self._rotation.at_end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException) -> None:
        """Saves if training was ended by Ctrl-C, a signal or a ``nan_policy``, or, with ``save_on_exception``, by any exception."""
        on_any_exception = not is_lightnings(trainer) and self._should_save_on_exception(trainer)
        if not (on_any_exception or ends_everywhere(trainer, exception)):
            return
        if self._saved_step != trainer.global_step:
            self._rotation.at_exception(trainer)
        elif self._kept.files and not self._kept.last:
            # The step has a file already; ``last_model_path`` then names that one.
            self._kept = dataclasses.replace(self._kept, last=self._kept.files[-1])

    @property
    def _planned_rotation(self) -> PlannedRotation:
        return PlannedRotation(self)

    def _settle(self, trainer: Trainer) -> None:
        """Waits for a write in flight; only :class:`AsyncCheckpoint` has one."""

    def _is_due_epoch(self, trainer: Trainer) -> bool:
        return bool(self.every_n_epochs) and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _should_save_on_exception(self, trainer: Trainer) -> bool:
        """Returns whether ``save_on_exception`` asks for a file of this step."""
        return self.save_on_exception and trainer.state.fitting and not trainer.fast_dev_run

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        """Returns whether files are saved at the end of the train epoch, not after validation."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        return checks_at_train_epoch_end(trainer)

    def _metrics(self, trainer: Trainer) -> dict[str, Tensor | float]:
        """Returns the values that rank and name a file."""
        return {**trainer.monitored_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def _check_monitor(self, trainer: Trainer, *, ranked: bool) -> None:
        """Raises :class:`ConfigError` if ``monitor`` is missing after a full epoch; before that, only notes that it is missing."""
        missing = self.monitor is not None and self.monitor not in self._metrics(trainer)
        if ranked and missing and self._metrics_complete:
            argument = f"ModelCheckpoint(monitor={self.monitor!r})"
            raise ConfigError(
                f"{missing_monitor(trainer, argument, str(self.monitor))}; 'epoch' and 'step' always exist"
            )
        self._unjudged = self._unjudged or missing

    def _write(self, trainer: Trainer, plan: SavePlan, write: Callable[[str, StateDict], None] | None = None) -> None:
        """Lets the Trainer write the checkpoint; the callback state inside already includes the new file."""
        options: dict[str, Any] = {} if write is None else {"write": write}
        if self.trainable_only:
            options["trainable_only"] = True
        self._writing = plan.after
        try:
            trainer.save_checkpoint(plan.target, weights_only=self.save_weights_only, **options)
        finally:
            self._writing = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainingModule, checkpoint: StateDict) -> None:
        """Marks a checkpoint that this callback writes with the id of the current attempt."""
        if self._writing is None and not self._rotating:
            return
        checkpoint[WRITTEN_BY] = self._lineage.attempt
        checkpoint.setdefault("callbacks", {self.state_key: self.state_dict()})  # weights-only files have none

    def _publish(self, trainer: Trainer, plan: SavePlan) -> None:
        """Updates the public paths and notifies the loggers, which may upload the file; runs only once the file exists."""
        self._kept = plan.after.without(plan.remove)
        self._assigned = {}
        self._last_checkpoint_saved = plan.target
        trainer.delivery.after_save_checkpoint(self)

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

    def _check_arguments(self) -> None:
        """Raises :class:`ConfigError` for arguments that cannot work in any run."""
        self._template(self.filename)
        if self.mode not in ("min", "max"):
            raise ConfigError(f"ModelCheckpoint(mode={self.mode!r}): choose 'min' (lower is better) or 'max'")
        if self.save_last not in (None, True, False, "link"):
            raise ConfigError(f"ModelCheckpoint(save_last={self.save_last!r}): choose True, False or 'link'")
        if self.save_top_k < -1:
            raise ConfigError(f"ModelCheckpoint(save_top_k={self.save_top_k}): give a number, 0 for none, -1 for all")
        if self.monitor is None and self.save_top_k > 1:
            raise ConfigError(
                f"ModelCheckpoint(save_top_k={self.save_top_k}) without a monitor: name a metric, or 'step' with mode='max'"
            )
        steps = self.every_n_train_steps
        epochs = self.every_n_epochs
        interval = self.train_time_interval
        for name, length in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
            if length < 0:
                raise ConfigError(f"ModelCheckpoint({name}={length}): choose 1 or more, or 0 for never")
        if interval is not None and not (isinstance(interval, timedelta) and interval >= timedelta(0)):
            raise ConfigError(
                f"ModelCheckpoint(train_time_interval={interval!r}): give a timedelta such as timedelta(minutes=30)"
            )
        lengths = {"every_n_train_steps": steps, "every_n_epochs": epochs, "train_time_interval": interval}
        given = [name for name, length in lengths.items() if length not in (0, None)]  # timedelta(0) is each step
        if len(given) > 1 and self.every is None:
            raise ConfigError(
                f"ModelCheckpoint was given {' and '.join(given)}: choose one, or every='100 steps, 1 epoch, 30 min' for several"
            )


def _chosen_cadence(every: str | None, steps: int | None, epochs: int | None, interval: timedelta | None) -> Every:
    """Returns the cadence from ``every``, or from Lightning's three arguments with their default."""
    if every is None:
        if epochs is None:
            epochs = 0 if steps or interval is not None else 1
        return Every(steps or 0, epochs, interval)
    if any(length is not None for length in (steps, epochs, interval)):
        raise ConfigError(
            f"ModelCheckpoint(every={every!r}) is the whole schedule of saves: leave every_n_train_steps, train_time_interval and "
            "every_n_epochs out"
        )
    return parse_every(every)
