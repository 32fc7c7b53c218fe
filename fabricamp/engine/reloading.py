"""Makes a feed of the training loader, and replaces it in epochs that reload their loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricamp.engine.parts import limits_of
from fabricamp.engine.profiling import profile_train_feed

if TYPE_CHECKING:
    from fabricamp.data import Feed
    from fabricamp.engine.parts import FitParts
    from fabricamp.engine.session import Session


def train_feed(session: Session) -> Feed:
    """Returns the feed of a fit's training batches."""
    data = session.data
    return profile_train_feed(session.trainer, data.feed(data.train_loader, data.num_training_batches))


def renew(session: Session, parts: FitParts) -> None:
    """Called before an epoch: sets its ``accumulate_grad_batches``, and its loaders if the epoch reloads them."""
    session.settings.begin_epoch(session.trainer.state.epoch)
    if not session.data.renew():
        return
    session.forget_validation()
    if parts.feed is session.data.train_feed:  # given loaders are not reloaded
        return
    parts.loader, parts.feed = session.data.train_loader, train_feed(session)
    parts.limits = limits_of(session.settings, session.data.num_training_batches, session.trainer.state.started)
    session.resume_point.use(parts.feed)
