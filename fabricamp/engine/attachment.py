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

    __slots__ = ("lent", "manual_backward", "manual_clip", "metrics", "optimizers", "schedulers", "toggled", "trainer")

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.metrics: Metrics | None = None
        self.optimizers: list[ManagedOptimizer] = []
        self.schedulers: list[Any] = []
        self.manual_backward: Callable[..., None] | None = None
        self.manual_clip: Callable[[Optimizer, Clip], None] | None = None
        self.toggled: list[Tensor] = []
        """What ``toggle_optimizer`` froze."""
        self.lent: list[tuple[object, str]] = []
        """Callbacks that have methods of the module's for the run, and the methods' names."""

    def show_dtypes(self) -> None:
        """Lets ``self.dtype`` say what the parameters are now; a module of ours looks at them itself."""

    def release(self) -> None:
        """Takes back what was lent for the run: callbacks the module's methods; a second time changes nothing."""
        for callback, name in self.lent:
            vars(callback).pop(name, None)
        self.lent = []

    def __reduce__(self) -> tuple[type[Attachment], tuple[()]]:
        return Attachment, ()


DETACHED = Attachment()
