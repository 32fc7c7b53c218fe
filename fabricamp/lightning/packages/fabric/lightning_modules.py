"""LightningModules in a loop around Fabric, whose ``self.log``, ``self.logger`` and ``self.manual_backward`` are Fabric's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricamp.engine.run_context import RunContext

if TYPE_CHECKING:
    from fabricamp.lightning.packages.fabric.fabric import Fabric
    from fabricamp.module import TrainingModule

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods that run at the precision, as ``forward`` does."""


class FabricAsTrainer:
    """What a module's ``trainer`` is within a loop around Fabric: Fabric's ranks, loggers and words."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    @property
    def logger(self) -> Any:
        """Fabric's first logger, or None."""
        return next(iter(self._fabric.loggers), None)

    @property
    def precision_plugin(self) -> Any:
        """The precision."""
        return self._fabric._precision

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._fabric, name)
        except AttributeError:
            raise AttributeError(f"trainer.{name}: in a loop around Fabric a module has no Trainer") from None


class _Logged:
    """In place of a run's metrics: each ``self.log`` goes to Fabric's loggers at once."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def keep(self, call: tuple[Any, ...], value: Any, batch_size: int | None = None) -> None:
        """Logs the value under the name of the call."""
        self._fabric.log(call[0], value)

    def note_collection(self, collection: Any) -> None:
        """Needs no note: Fabric logs numbers."""


def attach(module: TrainingModule, fabric: Fabric, optimizers: list[Any]) -> None:
    """Lets the module's methods use ``fabric``."""
    context: Any = RunContext()
    context.trainer = FabricAsTrainer(fabric)
    context.metrics = _Logged(fabric)
    context.optimizers = optimizers
    context.manual_backward = fabric.backward
    object.__setattr__(module, "_attachment", context)
