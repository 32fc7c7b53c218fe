"""Checks periodically that all ranks have the same parameters."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fabricamp.arguments.checks import check_number
from fabricamp.callbacks.base import Callback
from fabricamp.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fabricamp._utils.types import AnyBatch, AnyOutput
    from fabricamp.module import TrainingModule
    from fabricamp.trainer import Trainer

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DivergenceCheck(Callback):
    """Compares a checksum of every parameter's bits across the ranks.

    Ranks that have diverged (a step that one of them skipped, gradients changed on one rank, different seeds) continue to train
    without an error, and their results are worthless.  If one rank differs, all ranks raise :class:`DistributedError` with the
    rank and the first parameter.  A check reads every parameter once and waits for the device; with one process there is nothing
    to check.

    Args:
        every_n_steps: number of steps between two checks.

    Example:
        >>> check = DivergenceCheck(every_n_steps=1000)
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        super().__init__()
        self.every_n_steps = check_number("every_n_steps", every_n_steps, owner="DivergenceCheck", least=1)
        self._next_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Checks the initial parameters."""
        self._next_step = trainer.global_step
        self._check_if_due(trainer, pl_module)

    def holds_at(self, global_step: int) -> float:
        """Returns the step of the next check."""
        return max(self._next_step, global_step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Checks if a check is due."""
        self._check_if_due(trainer, pl_module)

    def _check_if_due(self, trainer: Trainer, module: TrainingModule) -> None:
        step = trainer.global_step
        if step < self._next_step or trainer.world_size == 1:
            return
        self._next_step = (step // self.every_n_steps + 1) * self.every_n_steps
        named = list(module.named_parameters())
        if not named:
            return
        by_rank = trainer.strategy.all_gather(_checksums(parameter for _, parameter in named)).tolist()
        if any(sums != by_rank[0] for sums in by_rank):
            raise DistributedError(_message(step, [name for name, _ in named], by_rank))


def _checksums(parameters: Iterable[Tensor]) -> Tensor:
    """Returns an int64 per parameter: the sum of its bits read as integers, equal for equal bits on any device."""
    return torch.stack([_bits(parameter.detach()).sum(dtype=torch.int64) for parameter in parameters])


def _bits(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_WORDS[values.element_size()])


def _message(step: int, names: list[str], by_rank: list[list[int]]) -> str:
    """Returns the message: which rank differs from the majority (without one: from rank 0), and in which parameter first."""
    counts = collections.Counter(tuple(sums) for sums in by_rank)
    most_common, _ = max(counts.items(), key=lambda item: (item[1], list(item[0]) == by_rank[0]))
    majority = list(most_common)
    rank = next(rank for rank, sums in enumerate(by_rank) if sums != majority)
    differing = [name for name, own, other in zip(names, by_rank[rank], majority, strict=True) if own != other]
    other_rank = next(rank for rank, sums in enumerate(by_rank) if sums == majority)
    return (
        f"DivergenceCheck: after step {step} the parameters of rank {rank} differ from those of rank {other_rank}: {differing[0]} "
        f"is the first of {len(differing)} that differ (of {len(names)}). Look for work that only some ranks do: code under "
        "`if rank == 0`, gradients or parameters changed in a hook, an optimizer step that one rank skips, random numbers that "
        "should be the same"
    )
