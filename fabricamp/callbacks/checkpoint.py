"""The base class of callbacks that write checkpoints."""

from __future__ import annotations

from fabricamp.callbacks.base import Callback


class Checkpoint(Callback):
    """Base class of :class:`ModelCheckpoint` and of your own checkpoint callbacks.

    ``trainer.checkpoint_callbacks`` lists them, and their hooks are called after those of other callbacks.  A Trainer with such a
    callback adds no :class:`ModelCheckpoint` by itself.
    """
