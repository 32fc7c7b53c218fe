"""The base of callbacks that write checkpoints."""

from __future__ import annotations

from fabricamp.callbacks.base import Callback


class Checkpoint(Callback):
    """What :class:`ModelCheckpoint` and a checkpoint callback of your own derive from.

    ``trainer.checkpoint_callbacks`` lists them, their hooks are called after those of other callbacks, and a Trainer that has one
    adds no :class:`ModelCheckpoint` by itself.
    """
