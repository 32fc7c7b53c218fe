"""A module's references to the run that it is in."""

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
    """A module's references to the run that it is in.  Copies and pickles of the module never contain them."""

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
        """Methods of the module that are temporarily attached to callbacks: (callback, the method's name)."""

    def show_dtypes(self) -> None:
        """Updates ``self.dtype`` after a conversion; nothing to do for fabricamp's modules, which look at their parameters."""

    def release(self) -> None:
        """Removes the module's methods from callbacks, to which they were attached for the run; a second call changes nothing."""
        for callback, name in self.lent:
            vars(callback).pop(name, None)
        self.lent = []

    def __reduce__(self) -> tuple[type[Attachment], tuple[()]]:
        return Attachment, ()


DETACHED = Attachment()
