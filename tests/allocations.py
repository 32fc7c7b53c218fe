"""A mode that raises if fabricamp creates a tensor without naming device and dtype."""

import sys

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

FACTORIES = frozenset(_device_constructors())
TYPED = (torch.tensor, torch.as_tensor, torch.asarray)
"""For a tensor or an array, these functions keep its dtype, and its device if it has one."""


class NamedAllocations(TorchFunctionMode):
    """Raises AssertionError for a factory call from fabricamp's own frames that leaves device or dtype to torch's defaults.

    A module's constructor may pass None on: torch's defaults then decide, as with torch's layers.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FACTORIES:
            check(func, args, kwargs, sys._getframe(1))
        return func(*args, **kwargs)


def check(func, args, kwargs, frame):
    name = frame.f_globals.get("__name__", "")
    if name.partition(".")[0] != "fabricamp":
        return
    if isinstance(frame.f_locals.get("self"), nn.Module) and frame.f_code.co_name == "__init__":
        missing = [key for key in ("device", "dtype") if key not in kwargs]
    else:
        missing = [key for key in ("device", "dtype") if kwargs.get(key) is None]
    if func in TYPED and isinstance(args[0], torch.Tensor):
        return
    assert not missing, f"{name}:{frame.f_lineno}: torch.{func.__name__} names no {' and no '.join(missing)}"


@pytest.fixture(autouse=True)
def named_allocations():
    """A fixture for a folder's conftest: every test of the folder runs in the mode."""
    with NamedAllocations():
        yield
