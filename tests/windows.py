"""The loop's calls of a Precision, for tests without a Trainer."""

from __future__ import annotations

import torch

from fabricamp.gradients.memory import GradientMemory


def end_step(precision, loss):
    """Ends a step as the loop does; there are step statuses only if a step may be skipped."""
    if precision.verdicts is None:
        return None
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
