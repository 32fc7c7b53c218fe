"""Resolves the arguments ``accelerator`` and ``devices`` to existing devices.

After :func:`resolve_devices` come Lightning's accelerator objects: a device type, and the number of such devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from fabricamp.arguments.checks import check_choice
from fabricamp.errors import ConfigError, meant, nearest

if TYPE_CHECKING:
    from fabricamp.strategies.base import Environment

ACCELERATORS = ("auto", "cpu", "gpu", "cuda")

_FORMS = 'devices takes "auto", -1 (all), a number such as 2 or "2", or GPU numbers such as [0, 1] or "0,1"'


def resolve_devices(
    accelerator: str = "auto", devices: object = "auto", environment: Environment | None = None
) -> tuple[str, list[int]]:
    """Returns the torch device type and one device number per process of this machine.

    On the CPU the numbers only count the processes.  With an ``environment`` (this process was started by torchrun, SLURM, ...),
    "auto" means one device per started process, except on the CPU if fabricamp started them.  GPUs are counted without
    initialising CUDA: the process can still be forked.
    """
    if accelerator not in ACCELERATORS and (cure := meant("accelerator", accelerator)):
        raise ConfigError(f"accelerator={accelerator!r} is not known{cure}")
    check_choice("accelerator", accelerator, ACCELERATORS)
    available = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and not available:
        raise ConfigError(
            f"accelerator={accelerator!r} needs a CUDA GPU, and torch {torch.__version__} sees none here; "
            f'check the driver with nvidia-smi, install torch\'s CUDA build, or use accelerator="cpu"'
        )
    wanted = _parse(devices)
    started = None if environment is None else environment.local_world_size
    if not available:
        # In processes that an earlier Trainer of the script has started, "auto" means what it means in a plain process.
        automatic = 1 if environment is None or environment.name == "script" else environment.local_world_size
        return "cpu", _cpu_processes(devices, wanted, automatic)
    if available == 1 and started is not None and wanted == started:
        # SLURM may make only one GPU visible to each task: the task's own.
        return "cuda", [0] * started
    numbers = _gpu_numbers(devices, wanted, available)
    if devices == "auto":
        numbers = numbers[:started]
    return "cuda", numbers


def _parse(devices: object) -> int | list[int]:
    """Returns ``devices`` as a count (-1 for all, also for "auto") or as a list of device numbers."""
    if devices == "auto":
        return -1
    if isinstance(devices, str):
        try:
            if "," in devices:
                return [int(part) for part in devices.split(",") if part.strip()]
            return int(devices)
        except ValueError:
            raise ConfigError(f"devices={devices!r} cannot be read{nearest(devices, ['auto'])} ({_FORMS})") from None
    if isinstance(devices, int) and not isinstance(devices, bool):
        return devices
    if isinstance(devices, Sequence) and all(type(number) is int for number in devices):
        return list(devices)
    raise ConfigError(f"devices={devices!r} cannot be read; {_FORMS}")


def _cpu_processes(devices: object, wanted: int | list[int], automatic: int) -> list[int]:
    if devices == "auto":
        return list(range(automatic))
    if isinstance(wanted, list) or wanted < 1:
        raise ConfigError(
            f"devices={devices!r} is not a number of CPU processes; on the CPU give 1 or more, "
            f'or "auto" (1); for GPUs use accelerator="gpu" on a machine that has some'
        )
    return list(range(wanted))


def _gpu_numbers(devices: object, wanted: int | list[int], available: int) -> list[int]:
    gpus = "is 1 GPU" if available == 1 else f"are {available} GPUs"
    there_are = f"there {gpus} here (0 to {available - 1})"
    if wanted == -1:
        return list(range(available))
    numbers = list(range(wanted)) if isinstance(wanted, int) else wanted
    if not numbers:
        raise ConfigError(f"devices={devices!r} selects no device; {there_are}; {_FORMS}")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"devices={devices!r} names a GPU twice; every process needs one of its own; {there_are}")
    if min(numbers) < 0 or max(numbers) >= available:
        raise ConfigError(
            f"devices={devices!r} asks for GPUs that are not there; {there_are}; ask for fewer, or -1 for all"
        )
    return numbers


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
    usable: list[int] = []
    for number in range(torch.cuda.device_count()):
        if len(usable) == num_devices:
            break
        try:
            torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", number))
        except RuntimeError:
            continue
        usable.append(number)
    if len(usable) < num_devices or (num_devices != 0 and not usable):
        raise ConfigError(
            f"find_usable_cuda_devices(num_devices={num_devices!r}) found {len(usable)} of {torch.cuda.device_count()} GPUs that "
            "can be used; ask for fewer, or end what holds the others (nvidia-smi)"
        )
    return usable
