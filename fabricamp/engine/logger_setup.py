"""Prepares loggers before a run: every rank gets the identity of rank 0's run, and hyper-parameters are logged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.checkpoint import check_content, plain
from fabricamp.checkpoint.hyperparameters import SavedHyperparameters, saved_hyperparameters
from fabricamp.errors import ConfigError
from fabricamp.loggers.run_folder import folder_of

if TYPE_CHECKING:
    from fabricamp.engine.session import Session
    from fabricamp.trainer.trainer import Trainer


def join_loggers(trainer: Trainer) -> None:
    """Gives every rank the run identities of rank 0's loggers, such as the next free folder; called on every rank."""
    identities = trainer.strategy.on_rank_zero(lambda: [one.identity() for one in trainer.loggers])
    for one, identity in zip(trainer.loggers, identities, strict=True):
        one.join(identity)
    first = next((one for one in trainer.loggers if one.log_dir is not None), None)
    found = (trainer.default_root_dir, trainer.root_folder)
    if first is not None:
        found = (str(first.log_dir), str(folder_of(first)))
    trainer.log_dir, trainer.log_folder = trainer.strategy.broadcast(found)


def kept_of(session: Session) -> list[tuple[str, SavedHyperparameters]]:
    """Returns the hyper-parameters of DataModule and module, if they have any, with the names of their classes."""
    owners = [one for one in (session.source.datamodule, session.module) if one is not None]
    return [(type(one).__name__, kept) for one in owners if (kept := saved_hyperparameters(one)).values]


def log_hyperparams(session: Session) -> None:
    """Logs the hyper-parameters; raises for values that no checkpoint could hold."""
    logged: dict[str, Any] = {}
    shows = session.settings.enable_autolog_hparams and bool(session.trainer.loggers)
    for owner, kept in kept_of(session):
        written = plain(kept.values, private=kept.private)
        # Raises before training, not at the first checkpoint.
        check_content(written, f"hyper-parameters of {owner}")
        if kept.logged:
            if shows:
                _check_shared(owner, logged, written)
            logged |= written
    if logged and shows:
        session.delivery.log_hyperparams(logged)


def _check_shared(owner: str, logged: dict[str, Any], more: dict[str, Any]) -> None:
    """Raises :class:`ConfigError` for a name with two values: a logger shows only one, which would be wrong for one owner."""
    other = [name for name in logged if name in more and str(logged[name]) != str(more[name])]
    if other:
        raise ConfigError(
            f"{owner} and the DataModule keep other values under the same names: {', '.join(other)}. A logger shows one of them; "
            f"rename one, leave it out by save_hyperparameters(ignore={other!r}), or give save_hyperparameters(logger=False) in one"
        )
