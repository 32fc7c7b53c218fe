"""A pass over the training data that changes only what ``forward`` itself changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.data import set_epoch
from fabricamp.engine.update import with_index
from fabricamp.state import Scope

if TYPE_CHECKING:
    from fabricamp.engine.session import Session


def forward_train_batches(session: Session) -> None:
    """Runs ``training_step`` on every batch of an epoch: no backward, no update, no hook of a batch, nothing logged."""
    state, metrics, data = session.trainer.state, session.metrics, session.data
    step = with_index(session.module.training_step, session.module.training_step)
    before, muted = (state.scope, state.batch, state.batch_idx), metrics.muted
    set_epoch(data.train_loader, state.epoch)
    feed = data.feed(data.train_loader, data.num_training_batches)
    state.scope, metrics.muted = Scope.TRAIN_STEP, True
    try:
        for number, batch in enumerate(feed):
            state.batch, state.batch_idx = batch, number  # the watchdog sees progress by this number
            session.precision.forward(step, batch, number)
        feed.finish()
    finally:
        state.scope, state.batch, state.batch_idx = before
        metrics.muted = muted
        feed.close()
