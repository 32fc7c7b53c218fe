"""Fits of two epochs of two steps and a dropped micro-batch, for tests of strategies, precisions and optimizers of one's own."""

from __future__ import annotations

import torch

from fabricamp import Callback
from tests.small import Classifier, loader, quiet_trainer

BATCHES = 5
"""Micro-batches of an epoch: two steps of two, and one that is left."""


class WithOptimizer(Classifier):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


class Saves(Callback):
    """Writes a checkpoint behind a micro-batch."""

    def __init__(self, path, at):
        self.path = path
        self.at = at
        self.done = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.done += 1
        if self.done == self.at:
            trainer.save_checkpoint(self.path)


def fit(module=None, *callbacks, ckpt_path=None, validates=True, **options):
    module = Classifier() if module is None else module
    given = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "partial_window": "drop",
        "callbacks": list(callbacks),
        **options,
    }
    trainer = quiet_trainer(**given)
    trainer.fit(module, loader(4 * BATCHES), loader(8) if validates else None, ckpt_path=ckpt_path)
    return trainer, module


def assert_same_weights(module, other, *, tolerance=0.0):
    own, theirs = module.state_dict(), other.state_dict()
    assert list(own) == list(theirs)
    for name, value in own.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


def only(calls, *names):
    """Those of ``calls`` with these names, in their order; what fabricamp asks for besides is its own affair."""
    return [call for call in calls if call[0] in names]


def moved(module):
    return not torch.equal(module.net[0].weight, Classifier().net[0].weight)


def noting(base, *names):
    """Returns a subclass of ``base`` that passes calls of these methods on, and notes them in ``calls`` with their plain values."""

    def noted(name):
        def method(self, *given, **options):
            values = [value for value in (*given, *options.values()) if isinstance(value, bool | int | float | str)]
            vars(self).setdefault("calls", []).append((name, *values))
            return getattr(super(kind, self), name)(*given, **options)

        return method

    kind = type(f"Noting{base.__name__}", (base,), {"name": "noting", **{name: noted(name) for name in names}})
    return kind
