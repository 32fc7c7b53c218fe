"""Optimizers with two modes: the schedule-free ones train other weights than those that are to be evaluated.

Their ``train()`` and ``eval()`` put these weights into the parameters, in place; a second call of the same changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricamp._utils.types import OptimizerFace
    from fabricamp.precision.base import Precision


def with_modes(optimizers: Sequence[OptimizerFace]) -> list[Any]:
    """Returns the optimizers that note in their groups which mode they are in."""
    return [
        optimizer
        for optimizer in optimizers
        if any("train_mode" in group for group in optimizer.param_groups)
        and callable(getattr(optimizer, "train", None))
        and callable(getattr(optimizer, "eval", None))
    ]


def train(optimizers: Sequence[OptimizerFace], precision: Precision) -> None:
    """Puts the weights to train into the parameters."""
    _switch(optimizers, precision, "train")


def evaluate(optimizers: Sequence[OptimizerFace], precision: Precision) -> None:
    """Puts the weights to evaluate, and to use, into the parameters."""
    _switch(optimizers, precision, "eval")


@torch.no_grad()
def _switch(optimizers: Sequence[OptimizerFace], precision: Precision, mode: str) -> None:
    switched = with_modes(optimizers)
    if not switched:
        return
    precision.take_edits()  # masters have not seen yet what hooks have written
    for optimizer in switched:
        getattr(optimizer, mode)()
        for group in optimizer.param_groups:
            # Moves their version counters, which show the write to whoever has half copies: pytorch_optimizer's pass them by.
            torch._foreach_mul_(group["params"], 1)
    precision.take_edits()  # half weights have not seen yet what was written to their masters
