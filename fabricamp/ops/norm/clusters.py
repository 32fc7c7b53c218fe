"""Thread-block clusters: the sizes that a device supports, and how many clusters of a kernel it holds at once."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from fabricamp.ops.bridge import Kernel

_CLUSTER_DIMENSION: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, 72 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def sizes(device: torch.device) -> tuple[int, ...]:
    """Returns the possible numbers of blocks in a cluster: up to 8, which every card from compute capability 9.0 on supports."""
    has_clusters = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (1, 2, 4, 8) if has_clusters else (1,)


def resident(kernel: Kernel, device: torch.device, size: int, threads: int, shared: int) -> int | None:
    """Returns how many clusters of ``size`` blocks ``device`` holds at once, or None if its driver does not say.

    That may be fewer than the resident blocks divided by ``size``: the blocks of a cluster run on neighbouring multiprocessors, and
    not every group of multiprocessors holds a multiple of ``size``.
    """
    if device.type != "cuda":
        return None
    import cupy

    (attribute,) = attributes = (_Attribute * 1)(_Attribute(_CLUSTER_DIMENSION, 0, (size, 1, 1)))
    assert ctypes.sizeof(attribute) == 72
    config = _Config((size, 1, 1), (threads, 1, 1), shared, None, attributes, 1)
    found = ctypes.c_int()
    with cupy.cuda.Device(device.index):
        cupy.cuda.runtime.memGetInfo()  # binds the context to this thread, maybe one of autograd's
        try:
            ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
        except (OSError, AttributeError):
            return None
        status = ask(ctypes.byref(found), ctypes.c_void_p(kernel.address), ctypes.byref(config))
    return found.value if status == 0 and found.value > 0 else None
