"""What ties a module to the run that it is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from fabricamp.engine.optimizer_setup import ManagedOptimizer
    from fabricamp.metrics import Metrics
    from fabricamp.precision.base import Clip
    from fabricamp.trainer import Trainer


class Attachment:
    """What ties a module to the run that it is in.  It never travels with copies or pickles of the module."""

    __slots__ = ("manual_backward", "manual_clip", "metrics", "optimizers", "schedulers", "toggled", "trainer")

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.metrics: Metrics | None = None
        self.optimizers: list[ManagedOptimizer] = []
        self.schedulers: list[Any] = []
        self.manual_backward: Callable[..., None] | None = None
        self.manual_clip: Callable[[Optimizer, Clip], None] | None = None
        self.toggled: list[Tensor] = []
        """What ``toggle_optimizer`` froze."""

    def show_dtypes(self) -> None:
        """Lets ``self.dtype`` say what the parameters are now; a module of ours looks at them itself."""

    def release(self) -> None:
        """Takes back what the module was lent for the run; one of ours was lent nothing."""

    def __reduce__(self) -> tuple[type[Attachment], tuple[()]]:
        return Attachment, ()


DETACHED = Attachment()
