"""The registry of accelerators; libraries may register their own, but the Trainer only runs on CPUs and CUDA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fabricamp.errors import ConfigError
from fabricamp.launch.devices import CPUAccelerator, CUDAAccelerator


class _AcceleratorRegistry(dict[str, Any]):
    """Maps a name such as "cuda" to a class, its description and the arguments with which :meth:`get` constructs it."""

    def register(
        self,
        name: str,
        accelerator: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Callable[..., Any]:
        """Registers a class; returns a decorator that registers if ``accelerator`` is None."""
        if not isinstance(name, str):
            raise TypeError(f"the name of an accelerator is a string, not {name!r}")
        if name in self and not override:
            raise ConfigError(f"the accelerator {name!r} is registered already; give override=True to replace it")

        def add(kind: Callable[..., Any]) -> Callable[..., Any]:
            self[name] = {
                "description": description,
                "init_params": init_params,
                "accelerator": kind,
                "accelerator_name": name,
            }
            return kind

        return add if accelerator is None else add(accelerator)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a new object of the class registered as ``name``, else ``default``; raises KeyError without a default."""
        if name in self:
            return self[name]["accelerator"](**self[name]["init_params"])
        if default is None:
            raise KeyError(f"no accelerator is called {name!r}; there are {sorted(self)}")
        return default

    def remove(self, name: str) -> None:
        """Removes a name."""
        self.pop(name)

    def available_accelerators(self) -> set[str]:
        """Returns the registered names."""
        return set(self)

    def __str__(self) -> str:
        return f"Registered Accelerators: {', '.join(self)}"


ACCELERATOR_REGISTRY = _AcceleratorRegistry()
ACCELERATOR_REGISTRY.register("cpu", CPUAccelerator, description="CPUAccelerator")
ACCELERATOR_REGISTRY.register("cuda", CUDAAccelerator, description="CUDAAccelerator")
