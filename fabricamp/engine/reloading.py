"""The loader that is trained on as a feed, and others in its place where epochs are to have loaders of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.engine.parts import limits_of
from fabricamp.engine.profiling import profile_train_feed

if TYPE_CHECKING:
    from fabricamp.data import Feed
    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.session import Session


def train_feed(session: Session) -> Feed:
    """Returns the way of batches into the steps of a fit."""
    data = session.data
    return profile_train_feed(session.trainer, data.feed(data.train_loader, data.num_training_batches))


def renew(session: Session, parts: FitParts) -> None:
    """Before an epoch: its ``accumulate_grad_batches``, and its loaders where it is to have some of its own."""
    session.settings.begin_epoch(session.trainer.state.epoch)
    if not session.data.renew():
        return
    session.forget_validation()
    if parts.feed is session.data.train_feed:  # loaders that were given
        return
    parts.loader, parts.feed = session.data.train_loader, train_feed(session)
    parts.limits = limits_of(session.settings, session.data.num_training_batches, session.trainer.state.started)
    session.moments.use(parts.feed)
