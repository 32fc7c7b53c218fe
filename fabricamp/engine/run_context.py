"""A module's references to the run that it is in, and ``self.all_gather``, which uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabricamp.errors import ConfigError
from fabricamp.state import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.engine.optimizer_setup import ManagedOptimizer
    from fabricamp.metrics import Metrics
    from fabricamp.precision.base import Clip
    from fabricamp.strategies import Strategy
    from fabricamp.trainer import Trainer

_DIMENSIONS = 8
"""How many sizes of a tensor the ranks compare."""


class RunContext:
    """A module's references to the run that it is in.  Copies and pickles of the module never contain them."""

    __slots__ = (
        "lent_methods",
        "manual_backward",
        "manual_clip",
        "metrics",
        "optimizers",
        "schedulers",
        "toggled",
        "trainer",
    )

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.metrics: Metrics | None = None
        self.optimizers: list[ManagedOptimizer] = []
        self.schedulers: list[object] = []
        self.manual_backward: Callable[..., None] | None = None
        self.manual_clip: Callable[[Optimizer, Clip], None] | None = None
        self.toggled: list[Tensor] = []
        """The parameters that ``toggle_optimizer`` froze."""
        self.lent_methods: list[tuple[object, str]] = []
        """Methods of the module that are temporarily attached to callbacks: (callback, the method's name)."""

    def show_dtypes(self) -> None:
        """Updates ``self.dtype`` after a conversion; nothing to do for fabricamp's modules, which look at their parameters."""

    def release(self) -> None:
        """Removes the module's methods from callbacks, to which they were attached for the run; a second call changes nothing."""
        for callback, name in self.lent_methods:
            vars(callback).pop(name, None)
        self.lent_methods = []

    def __reduce__(self) -> tuple[type[RunContext], tuple[()]]:
        return RunContext, ()


DETACHED = RunContext()
"""The context of a module that is in no run."""


def gathered(trainer: Trainer, tensor: Tensor) -> Tensor:
    """Returns every rank's tensor, stacked; raises :class:`ConfigError` if shapes differ, except in a training step.

    A training step does not compare shapes: the host would have to wait for it, and batches have one size there.  With CUDA graphs
    shapes are never compared: the host must not wait in captured steps.
    """
    strategy = trainer.strategy
    session = trainer._runner.session
    captures = session is not None and session.settings.cuda_graph is not None
    if strategy.world_size > 1 and not captures and trainer.state.user_call.scope is not Scope.TRAIN_STEP:
        check_shapes(strategy, tensor)
    return strategy.all_gather(tensor)


def check_shapes(strategy: Strategy, tensor: Tensor) -> None:
    """Raises :class:`ConfigError` if shapes differ over ranks: the backends would end the process, or wait forever."""
    sizes = [tensor.ndim, *tensor.shape[:_DIMENSIONS]]
    padding = [0] * (_DIMENSIONS + 1 - len(sizes))
    row = torch.tensor([*sizes, *padding], dtype=torch.int64, device="cpu")
    shapes = [tuple(shape[:ndim]) for ndim, *shape in strategy.all_gather(row).tolist()]
    other = next((rank for rank, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ConfigError(
            f"all_gather got a tensor of shape {shapes[0]} on rank 0 and {shapes[other]} on rank {other}. Each rank evaluates its "
            "own samples, each sample once, and one rank may have more than another: pad the tensors to one length, "
            "gather it by torch.distributed.all_gather_object, or give the loader torch's DistributedSampler, which repeats "
            "samples, and Trainer(use_distributed_sampler=False)"
        )
