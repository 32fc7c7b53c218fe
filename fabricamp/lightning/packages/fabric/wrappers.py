"""What Fabric returns in place of modules, optimizers and loaders: each calls the Loop behind Fabric."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fabricamp._utils.containers import with_parts
from fabricamp.data import move_to_device, set_epoch
from fabricamp.lightning.packages.fabric.lightning_modules import STEPS
from fabricamp.module import TrainingModule
from fabricamp.precision.casting import cast_floating

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabricamp.lightning.packages.fabric.fabric import Fabric


class _FabricModule(nn.Module):
    """A module whose call runs at Fabric's precision; all else is the module's."""

    _fabric: Fabric
    _forward_methods: set[str]
    _original_module: nn.Module

    def __init__(self, fabric: Fabric, module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = module
        object.__setattr__(self, "_original_module", original)  # below torch.compile
        object.__setattr__(self, "_fabric", fabric)
        methods = STEPS if isinstance(original, TrainingModule) else ()
        object.__setattr__(self, "_forward_methods", set(methods))

    @property
    def module(self) -> nn.Module:
        """The module as it was given; a compiled one without its compilation."""
        return self._original_module

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter, or Fabric's."""
        first = next(self._original_module.parameters(), None)
        return self._fabric.device if first is None else first.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module at the precision; half outputs become the default dtype, as in Lightning."""
        return self._run(self._forward_module, *args, **kwargs)

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Lets another method of the module run as ``forward`` does."""
        self._forward_methods.add(method if isinstance(method, str) else method.__name__)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        dtype = self._fabric._input_dtype
        if dtype is not None:
            args = cast_floating(args, dtype)
            kwargs = cast_floating(kwargs, dtype)
        outputs = self._fabric._forward(self._original_module, partial(function, *args, **kwargs))
        return cast_floating(outputs, torch.get_default_dtype()) if self._fabric._casts_outputs else outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_original_module"], name)
        return partial(self._run, found) if name in self.__dict__["_forward_methods"] else found

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_original_module")
        if module is None or name == "training" or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's, under the module's names."""
        return self._original_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the module."""
        return self._original_module.load_state_dict(*args, **kwargs)


class _FabricOptimizer:
    """An optimizer whose ``step`` is Fabric's: exchanged, unscaled gradients; all else is the optimizer's."""

    def __init__(self, fabric: Fabric, optimizer: Optimizer) -> None:
        vars(self).update(_fabric=fabric, _optimizer=optimizer)
        # isinstance(..., Optimizer) holds, as for schedules of torch.
        self.__class__ = type(f"Fabric{type(optimizer).__name__}", (_FabricOptimizer, type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer as it was given."""
        return vars(self)["_optimizer"]  # type: ignore[no-any-return]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure``, then the update; gradients are cleared after it."""
        result = None if closure is None else closure()
        self._fabric._update(self.optimizer)
        return result

    def __getattribute__(self, name: str) -> Any:
        if name in ("step", "optimizer", "_fabric", "_optimizer", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "__dict__")["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("step", "__class__"):  # a schedule counts the calls of the step that it is given
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)


class _FabricDataLoader:
    """A loader whose batches are on the device; each pass has the sampler's next epoch."""

    def __init__(self, loader: Any, device: torch.device | None) -> None:
        self._loader = loader
        self._device = device
        self._passes = 0

    @property
    def device(self) -> torch.device | None:
        """Where batches are moved to; None leaves them."""
        return self._device

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        set_epoch(self._loader, self._passes)
        self._passes += 1
        for batch in self._loader:
            yield batch if self._device is None else move_to_device(batch, self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


def is_wrapped(obj: object) -> bool:
    """Returns whether Fabric returned the object from one of its ``setup`` methods."""
    return isinstance(obj, _FabricModule | _FabricOptimizer | _FabricDataLoader)


def _unwrap_objects(collection: Any) -> Any:
    """Returns the objects that Fabric has wrapped, in the same containers."""
    found = _unwrapped(collection)
    return with_parts(collection, _unwrap_objects) if found is collection else found


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _FabricModule):
        return value.module
    if isinstance(value, _FabricOptimizer):
        return value.optimizer
    return value._loader if isinstance(value, _FabricDataLoader) else value
