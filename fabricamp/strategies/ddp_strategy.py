"""Lightning's DDPStrategy: ``DDP`` with Lightning's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from fabricamp.errors import ConfigError
from fabricamp.strategies.base import Environment
from fabricamp.strategies.ddp import DDP

__all__ = ["DDPStrategy"]

_ELSEWHERE: Final = {
    "accelerator": "give Trainer(accelerator=...)",
    "parallel_devices": "give Trainer(devices=...)",
    "cluster_environment": "torchrun and SLURM are recognised by themselves",
    "checkpoint_io": "give Trainer(plugins=[...])",
    "precision_plugin": "give Trainer(precision=...)",
    "ddp_comm_wrapper": "wrap the hook before it is given",
    "model_averaging_period": "average in a Callback",
}
_START_METHODS: Final = {"popen": None, "spawn": "spawn", "fork": "fork", "forkserver": "spawn"}


class DDPStrategy(DDP):
    """:class:`DDP` under Lightning's name: the same options, some with Lightning's names.

    Args:
        ddp_comm_state: the state passed to the hook.
        ddp_comm_hook: a function of ``(state, bucket)``.
        process_group_backend: only "nccl" on GPUs and "gloo" on CPUs.
        timeout: seconds (or a timedelta) that a rank waits for the others; None is half an hour.
        start_method: "popen" (chosen automatically), "spawn", "fork" or "forkserver" (same as "spawn").
        **options: the options of :class:`DDP`.

    Raises:
        ConfigError: for arguments that are given elsewhere, such as ``parallel_devices``.

    Example:
        >>> DDPStrategy(find_unused_parameters=True).find_unused_parameters
        True
    """

    def __init__(
        self,
        *,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = None,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        for name, cure in _ELSEWHERE.items():
            if options.pop(name, None) is not None:
                raise ConfigError(f"DDPStrategy has no argument {name!r} here; {cure}")
        if start_method not in _START_METHODS:
            raise ConfigError(f"DDPStrategy(start_method={start_method!r}): give one of {', '.join(_START_METHODS)}")
        if ddp_comm_hook is not None:
            options["comm_hook"] = (ddp_comm_state, ddp_comm_hook)
        super().__init__(timeout=timeout, **_without_torchs_defaults(options))
        self.start_method = _START_METHODS[start_method]
        self.process_group_backend = process_group_backend

    def setup_environment(self, environment: Environment, device: torch.device) -> None:
        """Joins the other processes; raises :class:`ConfigError` for another backend than the device's."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        if self.process_group_backend not in (None, backend):
            raise ConfigError(
                f"DDPStrategy(process_group_backend={self.process_group_backend!r}): {device.type} devices exchange through "
                f"{backend!r} here; leave it out"
            )
        super().setup_environment(environment, device)


def _without_torchs_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Returns ``options`` without torch's defaults of what :class:`DDP` lacks: configurations that Lightning wrote have them."""
    own, torchs = (inspect.signature(kind).parameters for kind in (DDP, DistributedDataParallel))
    return {
        name: value
        for name, value in options.items()
        if name in own or name not in torchs or torchs[name].default != value
    }
