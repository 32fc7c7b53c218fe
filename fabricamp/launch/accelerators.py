"""Lightning's accelerator objects: the device type that a Trainer runs on, and the number of such devices."""

from __future__ import annotations

from typing import ClassVar

import torch

from fabricamp.errors import ConfigError


class Accelerator:
    """A device type."""

    name: ClassVar[str] = ""

    @staticmethod
    def is_available() -> bool:
        """Returns whether there is such a device."""
        return False

    @staticmethod
    def auto_device_count() -> int:
        """Returns the number of such devices."""
        return 0


class CPUAccelerator(Accelerator):
    """The CPU."""

    name: ClassVar[str] = "cpu"

    @staticmethod
    def is_available() -> bool:
        """Returns True."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """Returns 1, the default number of processes on the CPU."""
        return 1


class CUDAAccelerator(Accelerator):
    """NVIDIA's GPUs."""

    name: ClassVar[str] = "cuda"

    @staticmethod
    def is_available() -> bool:
        """Returns whether torch sees a GPU."""
        return torch.cuda.device_count() > 0

    @staticmethod
    def auto_device_count() -> int:
        """Returns the number of GPUs that torch sees, without initialising CUDA."""
        return torch.cuda.device_count()


def accelerator_of(device_type: str) -> Accelerator:
    """Returns the accelerator object for a torch device type."""
    return CUDAAccelerator() if device_type == "cuda" else CPUAccelerator()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Returns the numbers of GPUs on which a tensor can be created, for ``Trainer(devices=...)``; ``num_devices`` -1 means all.

    Skips a GPU in exclusive mode that another process holds.  Raises :class:`ConfigError` if there are fewer than ``num_devices``.
    """
    found: list[int] = []
    for number in range(torch.cuda.device_count()):
        if len(found) == num_devices:
            break
        try:
            torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", number))
        except RuntimeError:
            continue
        found.append(number)
    if len(found) < num_devices or (num_devices != 0 and not found):
        raise ConfigError(
            f"find_usable_cuda_devices(num_devices={num_devices!r}) found {len(found)} of {torch.cuda.device_count()} GPUs that "
            "can be used; ask for fewer, or end what holds the others (nvidia-smi)"
        )
    return found
