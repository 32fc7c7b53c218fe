"""What a loop does around a Precision, for tests without a Trainer."""

from __future__ import annotations

import torch

from fabricamp.gradients.memory import GradientMemory


def close_window(precision, loss):
    """Ends a window as the loop does: verdicts are there only where a window may be skipped."""
    return None if precision.verdicts is None else precision.verdicts.close_window(loss)


def add_up(precision, *optimizers):
    """Takes a micro-batch's gradients in, behind its backward, where the precision sums them."""
    for optimizer in optimizers:
        memory = precision.gradients(optimizer)
        if memory.flat is not None:
            memory.add()


def summed(*gradients):
    """A memory whose sums are these tensors."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    memory = GradientMemory(parameters, sums=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    memory.add()
    return memory
