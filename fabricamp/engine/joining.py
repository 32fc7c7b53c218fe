"""One run a logger for all ranks: rank 0 chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabricamp.trainer.trainer import Trainer


def join_loggers(trainer: Trainer) -> None:
    """Tells every rank which runs rank 0's loggers have, such as the next free folder; called on every rank."""
    identities = trainer.strategy.on_rank_zero(lambda: [one.identity() for one in trainer.loggers])
    for one, identity in zip(trainer.loggers, identities, strict=True):
        one.join(identity)
    found = next((str(one.log_dir) for one in trainer.loggers if one.log_dir is not None), None)
    trainer.log_dir = trainer.strategy.broadcast(found or trainer.default_root_dir)
