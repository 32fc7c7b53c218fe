"""The loop's calls around a Precision, for tests without a Trainer."""

from __future__ import annotations

import torch

from fabricamp.gradients.memory import GradientMemory


def close_window(precision, loss):
    """Ends an accumulation step as the loop does; ``verdicts`` is None if steps are never skipped."""
    return None if precision.verdicts is None else precision.verdicts.close_window(loss)


def add_up(precision, *optimizers):
    """Adds a micro-batch's gradients to the sums after its backward, if the precision has such sums."""
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
