"""Optimizers and schedulers that are built later: types of arguments, and what builds them from a class and its arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's scheduler with the name of the metric that it monitors."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Constructs the class ``init["class_path"]`` with ``args`` (one value or a tuple) and the keywords ``init["init_args"]``."""
    module, _, name = init["class_path"].rpartition(".")
    given = args if isinstance(args, tuple) else (args,)
    keywords = {**(init.get("init_args") or {}), **(init.get("dict_kwargs") or {})}
    return getattr(importlib.import_module(module), name)(*given, **keywords)
