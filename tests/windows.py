"""The loop's calls of a Precision, for tests without a Trainer."""

from __future__ import annotations

import torch

from fabricamp.gradients.flat import IN_PLACE
from fabricamp.gradients.memory import GradientMemory
from fabricamp.strategies.base import Strategy


def make_step(precision, optimizer, gradients=IN_PLACE, clip=None, *, run=None, look=None, loss=None):
    """Makes one step of one process, with ``gradients`` in place of exchanged ones; given the ``loss``, ends the training step."""
    step = precision.step_of(optimizer, Strategy(), clip)
    if gradients is not IN_PLACE:
        step.exchanges = True
        step.reduce = lambda _: gradients
    if look is None and run is None:
        step.run(loss)
    else:
        step.run_shown(loss, look or (lambda: clip), run)
    step.after()


def end_step(precision, loss=None):
    """Ends a step as the loop does, without ``loss`` if its launch has; there are statuses only if a step may be skipped."""
    if precision.verdicts is None:
        return None
    if loss is not None:
        precision.verdicts.launch_end(loss)
    return precision.verdicts.note_end()


def add_up(precision, *optimizers):
    """Adds a micro-batch's gradients after its backward, if the precision sums them."""
    for optimizer in optimizers:
        memory = precision.gradients(optimizer)
        if memory.flat is not None:
            memory.add()


def summed(*gradients):
    """Returns a GradientMemory with these tensors as its sums."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    memory = GradientMemory(parameters, sums=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    memory.add()
    return memory
