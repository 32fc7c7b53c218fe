"""Lightning's objects for kinds of devices: what a Trainer runs on, and how many of them there are."""

from __future__ import annotations

from typing import ClassVar

import torch

from fabricamp.errors import ConfigError


class Accelerator:
    """A kind of devices."""

    name: ClassVar[str] = ""

    @staticmethod
    def is_available() -> bool:
        """Whether there is such a device."""
        return False

    @staticmethod
    def auto_device_count() -> int:
        """How many of them there are."""
        return 0


class CPUAccelerator(Accelerator):
    """The CPU."""

    name: ClassVar[str] = "cpu"

    @staticmethod
    def is_available() -> bool:
        """True."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """1: that is how many processes run on it where no number is given."""
        return 1


class CUDAAccelerator(Accelerator):
    """NVIDIA's GPUs."""

    name: ClassVar[str] = "cuda"

    @staticmethod
    def is_available() -> bool:
        """Whether torch sees one."""
        return torch.cuda.device_count() > 0

    @staticmethod
    def auto_device_count() -> int:
        """How many torch sees; CUDA is not initialised by that."""
        return torch.cuda.device_count()


def accelerator_of(device_type: str) -> Accelerator:
    """Returns the object for a torch device type."""
    return CUDAAccelerator() if device_type == "cuda" else CPUAccelerator()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Returns the numbers of GPUs on which a tensor can be made, as ``Trainer(devices=...)`` takes them; -1 for all.

    A GPU in exclusive mode that another process holds is left out.  Raises :class:`ConfigError` where there are not that many.
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
