"""Dtypes and first values of modules: contexts of ``Fabric.init_module``, and a precision that ``Fabric.setup`` converts to."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from fabricamp.precision.named import TruePrecision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class ConvertedAtSetup(TruePrecision):
    """A "true" precision whose modules ``Fabric.setup`` has converted: what the program changes after it keeps its dtype."""

    def _convert_weights(self, module: nn.Module, dtype: torch.dtype) -> set[int]:
        return set()


class EmptyInit(TorchFunctionMode):
    """Leaves out the functions of ``torch.nn.init``: they change no tensor, and draw no random numbers."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the tensor as it is for a function of ``torch.nn.init``."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context with another default dtype of torch."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
