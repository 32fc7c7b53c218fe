"""``strategy="single_device"``: one process on one device, under the name and with the argument of Lightning's class."""

from __future__ import annotations

from typing import Any

import torch

from fabricamp.errors import ConfigError
from fabricamp.strategies.base import Environment, Strategy

__all__ = ["SingleDeviceStrategy"]


class SingleDeviceStrategy(Strategy):
    """One process on one device, which the Trainer's ``accelerator`` and ``devices`` choose.

    It is :class:`Strategy` under the name of Lightning's class; the strategy's ``name`` is inherited as well.

    Args:
        device: Lightning's argument, so that Lightning's scripts run.  It chooses nothing: it has to be the Trainer's device.  A
            type without an index (``"cuda"``) allows any index; a number is the index of a GPU.
        accelerator: Lightning's argument; it chooses nothing either.
        checkpoint_io: None; give ``plugins=`` to the Trainer.
        precision: that of a loop around Lightning's ``Fabric``; the Trainer has its own argument.

    Example:
        >>> SingleDeviceStrategy(device="cpu").name
        'single'
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: object = None,
        checkpoint_io: object = None,
        precision: Any = None,
    ) -> None:
        super().__init__()
        self._wanted = None if device is None else torch.device(device)
        if checkpoint_io is not None:
            raise ConfigError("SingleDeviceStrategy(checkpoint_io=...) is not used; give Trainer(plugins=[...])")
        self.given_precision = precision
        """The precision for Fabric, or None."""

    def setup_environment(self, environment: Environment, device: torch.device) -> None:
        """Sets the device; raises :class:`ConfigError` if another one was given."""
        wanted = self._wanted
        # A device without an index allows any device of its type.
        if wanted is not None and (wanted.type != device.type or wanted.index not in (None, device.index)):
            raise ConfigError(
                f"SingleDeviceStrategy(device={str(wanted)!r}), but the Trainer runs on {str(device)!r}; choose it by "
                f"Trainer(accelerator={wanted.type!r}, devices=...)"
            )
        super().setup_environment(environment, device)
