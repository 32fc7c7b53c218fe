"""``self.all_gather``: gathers tensors of every rank, and compares their shapes where they may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabricamp.errors import ConfigError
from fabricamp.state import Scope

if TYPE_CHECKING:
    from torch import Tensor

    from fabricamp.strategies import Strategy
    from fabricamp.trainer import Trainer

_DIMENSIONS = 8


def gathered(trainer: Trainer, tensor: Tensor) -> Tensor:
    """Returns every rank's tensor, stacked; raises :class:`ConfigError` if shapes differ, except in a training step.

    In a training step the host would have to wait for the comparison, and batches have one size.  With CUDA graphs shapes are
    never compared: the host must not wait in captured steps.
    """
    strategy, session = trainer.strategy, trainer._runner.session
    captures = session is not None and session.settings.cuda_graph is not None
    if strategy.world_size > 1 and not captures and trainer.state.scope is not Scope.TRAIN_STEP:
        check_shapes(strategy, tensor)
    return strategy.all_gather(tensor)


def check_shapes(strategy: Strategy, tensor: Tensor) -> None:
    """Raises :class:`ConfigError` if shapes differ over ranks: the backends would end the process, or wait forever."""
    sizes = [tensor.ndim, *tensor.shape[:_DIMENSIONS]]
    own = torch.tensor([*sizes, *[0] * (_DIMENSIONS + 1 - len(sizes))], dtype=torch.int64, device="cpu")
    shapes = [tuple(found[1 : found[0] + 1]) for found in strategy.all_gather(own).tolist()]
    other = next((rank for rank, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ConfigError(
            f"all_gather got a tensor of shape {shapes[0]} on rank 0 and {shapes[other]} on rank {other}. Ranks evaluate on their "
            "share of the samples, each sample once, and one may have more than another: pad what they have to one length, "
            "gather it by torch.distributed.all_gather_object, or give the loader torch's DistributedSampler, which repeats "
            "samples, and Trainer(use_distributed_sampler=False)"
        )
