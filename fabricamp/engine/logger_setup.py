"""Prepares loggers before a run: every rank gets the identity of rank 0's run, and hyper-parameters are logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.checkpoint import check_content, plain
from fabricamp.checkpoint.hyperparameters import SavedHyperparameters, saved_hyperparameters
from fabricamp.checkpoint.instantiate import CLASS_PATH
from fabricamp.errors import HyperparameterConflictError
from fabricamp.loggers.run_folder import folder_of

if TYPE_CHECKING:
    from fabricamp.data import DataModule
    from fabricamp.loggers.base import Logger
    from fabricamp.loggers.logger_collection import LoggerCollection
    from fabricamp.module import TrainingModule
    from fabricamp.trainer.properties import TrainerProperties
    from fabricamp.trainer.trainer import Trainer


def join_loggers(trainer: Trainer) -> None:
    """Gives every rank the run identities of rank 0's loggers, such as the next free folder; called on every rank."""
    identities = trainer.strategy.on_rank_zero(lambda: [logger.identity() for logger in trainer.loggers])
    for logger, identity in zip(trainer.loggers, identities, strict=True):
        logger.join(identity)
    first = first_with_folder(trainer)
    folders = (trainer.default_root_dir, trainer.root_folder)
    if first is not None:
        folders = (str(first.log_dir), str(folder_of(first)))
    trainer.log_dir, trainer.log_folder = trainer.strategy.broadcast(folders)


def first_with_folder(trainer: TrainerProperties) -> Logger | None:
    """Returns the first logger that has a folder."""
    return next((logger for logger in trainer.loggers if logger.log_dir is not None), None)


def kept_of(module: TrainingModule, datamodule: DataModule | None) -> list[tuple[str, SavedHyperparameters]]:
    """Returns the hyper-parameters of DataModule and module, if they have any, with the names of their classes."""
    owners = [one for one in (datamodule, module) if one is not None]
    return [(type(one).__name__, kept) for one in owners if (kept := saved_hyperparameters(one)).values]


def log_hyperparams(
    of_owners: list[tuple[str, SavedHyperparameters]], delivery: LoggerCollection, *, shows: bool
) -> None:
    """Logs the hyper-parameters from :func:`kept_of`, if ``shows``; raises for values that no checkpoint could hold."""
    logged: dict[str, Any] = {}
    for owner, kept in of_owners:
        values = plain(kept.values, private=kept.private)
        # Raises before training, not at the first checkpoint.
        check_content(values, f"hyper-parameters of {owner}")
        if kept.logged:
            values = {name: value for name, value in values.items() if name != CLASS_PATH}
            if shows:
                _check_shared(owner, logged, values)
            logged |= values
    if logged and shows:
        delivery.log_hyperparams(logged)


def _check_shared(owner: str, logged: dict[str, Any], values: dict[str, Any]) -> None:
    """Raises :class:`HyperparameterConflictError` for a name with two values: a logger shows one, wrong for the other owner."""
    names = [name for name in logged if name in values and str(logged[name]) != str(values[name])]
    if names:
        shown = ", ".join(map(str, names))
        raise HyperparameterConflictError(
            f"{owner} and the DataModule save different values under the same names: {shown}. A logger shows one of "
            f"them; rename one, leave it out by save_hyperparameters(ignore={names!r}), or give "
            "save_hyperparameters(logger=False) in one"
        )
