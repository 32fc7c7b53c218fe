"""Resolves the arguments ``accelerator`` and ``devices``, as the Trainer does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fabricamp.launch.devices import Accelerator, accelerator_of, resolve_devices
from fabricamp.lightning.packages.fabric.utilities.imports import _IS_INTERACTIVE as _IS_INTERACTIVE
from fabricamp.precision import Precision, precision_from


class _AcceleratorConnector:
    """Resolves the kind and the indices of the devices that a Trainer with the same arguments uses.

    Libraries use its names: scvi-tools (``_accelerator_flag``, ``_devices_flag``), rl4co (``_choose_auto_accelerator``),
    pyrelational (``strategy``, which has the device), and nequip, which replaces ``_choose_strategy`` and
    ``_check_and_init_precision``; fabricamp's Trainer calls neither.  The other
    arguments are Lightning's, and have no effect here.
    """

    def __init__(
        self,
        devices: Any = "auto",
        num_nodes: int = 1,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        plugins: Any = None,
        precision: Any = None,
        sync_batchnorm: bool = False,
        benchmark: bool | None = None,
        use_distributed_sampler: bool = True,
        deterministic: Any = None,
    ) -> None:
        name = accelerator.name if isinstance(accelerator, Accelerator) else accelerator
        kind, numbers = resolve_devices(name or "auto", "auto" if devices is None else devices)
        self.accelerator = accelerator_of(kind)
        self.use_distributed_sampler = use_distributed_sampler
        self._accelerator_flag = accelerator if isinstance(accelerator, Accelerator) else kind
        # As in Lightning: the number of processes on the CPU, else the list of GPU indices.
        self._devices_flag = len(numbers) if kind == "cpu" else numbers
        self._num_nodes_flag = num_nodes
        self._precision_flag = precision
        self._parallel_devices = [
            torch.device(kind, number) if kind == "cuda" else torch.device(kind) for number in numbers
        ]
        self.strategy = SimpleNamespace(root_device=self._parallel_devices[0])

    @staticmethod
    def _choose_auto_accelerator() -> str:
        return resolve_devices()[0]

    @staticmethod
    def _choose_gpu_accelerator_backend() -> str:
        return resolve_devices("gpu")[0]

    def _choose_strategy(self) -> str:
        return "ddp" if self.is_distributed else "single_device"

    def _check_and_init_precision(self) -> Precision:
        return precision_from("32-true" if self._precision_flag is None else self._precision_flag)

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return len(self._parallel_devices) * self._num_nodes_flag > 1
