"""The names of Lightning's command line: type hints, and classes that raise an error with advice."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fabricamp.callbacks.base import Callback
from fabricamp.lightning.refused import Refused


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler with the name of the metric that it monitors."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


ArgsType = list[str] | dict[str, Any] | Namespace | None
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]


class LightningCLI(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "cli.LightningCLI"


class LightningArgumentParser(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "cli.LightningArgumentParser"


class SaveConfigCallback(Refused, Callback):
    """Not offered: constructing it raises."""

    _lightnings_name = "cli.SaveConfigCallback"


def instantiate_class(args: Any, init: dict[str, Any]) -> Any:
    """Constructs the class ``init["class_path"]`` with ``args`` (one value or a tuple) and the keywords ``init["init_args"]``."""
    module, _, name = init["class_path"].rpartition(".")
    given = args if isinstance(args, tuple) else (args,)
    return getattr(importlib.import_module(module), name)(*given, **init.get("init_args", {}))
