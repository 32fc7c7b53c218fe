"""Checks whether a method is overridden, and saves and restores the training modes of submodules."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.overrides import is_overridden as _is_overridden
from torch import nn

from fabricamp.callbacks.base import Callback
from fabricamp.data import DataModule
from fabricamp.module import TrainingModule


def is_overridden(method_name: str, instance: object | None = None, parent: type | None = None) -> bool:
    """Returns whether ``instance`` overrides a method of ``parent``, by default of its base: module, DataModule or callback."""
    if instance is None:
        return False
    if parent is None:
        parent = next((base for base in (TrainingModule, DataModule, Callback) if isinstance(instance, base)), None)
    if parent is None:
        raise ValueError(f"a {type(instance).__name__} is no module, DataModule or callback; give parent=")
    overridden: bool = _is_overridden(method_name, instance, parent)
    return overridden


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """Returns a new torchvision model by name."""
    from torchvision import models  # type: ignore[import-not-found,unused-ignore]  # not a dependency

    model: nn.Module = models.get_model(model_name, **kwargs)
    return model


class _ModuleMode:
    """Saves and restores ``training`` of each submodule."""

    def __init__(self) -> None:
        self.mode: dict[str, bool] = {}

    def capture(self, module: nn.Module) -> None:
        """Saves the modes."""
        self.mode = {name: part.training for name, part in module.named_modules()}

    def restore(self, module: nn.Module) -> None:
        """Restores the modes; a submodule added since keeps its own."""
        for name, part in module.named_modules():
            part.training = self.mode.get(name, part.training)
