"""Lightning's names of what a ModelCheckpoint does in a save, for subclasses that override, call or read them.

What most of them do by default, and the order in which a save calls them, is in :mod:`fabricamp.lightning.rotation`; the short ones
stand here.
"""

from __future__ import annotations

from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from fabricamp.callbacks.checkpoint import Checkpoint
from fabricamp.checkpoint import link_checkpoint, storage
from fabricamp.habits import habits

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from fabricamp.callbacks._rotation import Rotation
    from fabricamp.callbacks.model_checkpoint import ModelCheckpoint
    from fabricamp.lightning.rotation import MethodRotation
    from fabricamp.trainer import Trainer


def _alias(attribute: str) -> property:
    return property(attrgetter(attribute), lambda callback, value: setattr(callback, attribute, value))


class OverridableSave(Checkpoint):
    """The base of :class:`ModelCheckpoint` with Lightning's methods of a save; if one is overridden, a save calls them all.

    Each function in this class is such a method; what is fabricamp's own is a property here, or in :class:`ModelCheckpoint`.
    """

    _last_global_step_saved: Any = _alias("_saved_step")
    _defer_save_until_validation: Any = _alias("_waits")
    _enable_version_counter: Any = _alias("enable_version_counter")
    _every_n_train_steps: Any = property(attrgetter("every_n_train_steps"))
    _every_n_epochs: Any = property(attrgetter("every_n_epochs"))
    _train_time_interval: Any = property(attrgetter("train_time_interval"))

    _named: frozenset[str] = frozenset()
    """Paths that these methods have chosen for files in this process."""
    _rotating = False
    """Whether these methods make a save now: each file that is written belongs to it."""

    @property
    def _fs(self) -> storage.FileSystem:
        """The file system of ``dirpath``."""
        return storage.filesystem_of(self._itself.dirpath or "")[0]

    @property
    def _itself(self) -> ModelCheckpoint:
        return cast("ModelCheckpoint", self)  # no other class has this base

    @property
    def _rotation(self) -> Rotation:
        """Makes the saves."""
        return self._methods if self._calls_methods else self._itself._planned_rotation

    @property
    def _calls_methods(self) -> bool:
        """Whether a method of a save is overridden, by a class or on the object, or a plug-in writes the files.

        A plug-in can write, load and remove files, but not copy and rename them as a plan does.
        """
        return self._itself._io is not None or any(
            name in vars(self) or getattr(type(self), name) is not getattr(OverridableSave, name)
            for name, member in vars(OverridableSave).items()
            if isinstance(member, FunctionType | staticmethod)
        )

    @property
    def _methods(self) -> MethodRotation:
        from fabricamp.lightning.rotation import MethodRotation

        return MethodRotation(self._itself)

    @property
    def _shares_models(self) -> bool:
        """Whether changes of the dict are adopted; otherwise a file that a native program drops from the dict would be removed."""
        is_own = type(self).__module__.startswith("fabricamp.")
        return not is_own or self._calls_methods or habits().best_models_are_shared

    # -- the methods of a save ---------------------------------------------------------------------------------------------------

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        saves_now = trainer.state.fitting and not trainer.fast_dev_run
        return not saves_now or self._itself._saved_step == trainer.global_step

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        return self._methods.monitor_candidates(trainer)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._methods.save_topk_checkpoint(trainer, monitor_candidates)

    def _save_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._methods.save_monitor_checkpoint(trainer, monitor_candidates)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Returns whether a file with the score ``current`` would be among the top k; the same on every rank."""
        return self._methods.check_monitor_top_k(trainer, current)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._methods.update_best_and_save(current, trainer, monitor_candidates)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._methods.save_none_monitor_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        self._methods.save_last_checkpoint(trainer, monitor_candidates)

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: Trainer, del_filepath: str | None = None
    ) -> str:
        return self._methods.free_name(monitor_candidates, trainer, del_filepath)

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Returns on every rank whether rank 0 sees a file of this name."""
        return trainer.strategy.on_rank_zero(lambda: storage.exists(storage.normalized(filepath)))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._methods.save_checkpoint(trainer, filepath)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if storage.normalized(filepath) != storage.normalized(linkpath):
            trainer.strategy.on_rank_zero(lambda: link_checkpoint(filepath, linkpath))

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        return self._methods.should_remove_checkpoint(trainer, previous, current)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._methods.remove_checkpoint(trainer, filepath)
