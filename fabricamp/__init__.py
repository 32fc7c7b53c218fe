"""fabricamp: a PyTorch trainer as exact as a hand-written loop, with apex's opt levels and fused kernels."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import fabricamp.messages  # noqa: F401 - sets up the logger for all messages

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from fabricamp import apex as apex
    from fabricamp import callbacks as callbacks
    from fabricamp import core as core
    from fabricamp import data as data
    from fabricamp import errors as errors
    from fabricamp import loggers as loggers
    from fabricamp import nn as nn
    from fabricamp import ops as ops
    from fabricamp import optimizers as optimizers
    from fabricamp import precision as precision
    from fabricamp import profilers as profilers
    from fabricamp import strategies as strategies
    from fabricamp import trainer as trainer
    from fabricamp import tuner as tuner
    from fabricamp import utilities as utilities
    from fabricamp.activations import Activations as Activations
    from fabricamp.callbacks.base import Callback as Callback
    from fabricamp.compilation import Compile as Compile
    from fabricamp.cuda_graph import CudaGraph as CudaGraph
    from fabricamp.data import DataModule as DataModule
    from fabricamp.errors import CheckpointError as CheckpointError
    from fabricamp.errors import ConfigError as ConfigError
    from fabricamp.errors import DistributedError as DistributedError
    from fabricamp.errors import FabricampError as FabricampError
    from fabricamp.errors import NonFiniteError as NonFiniteError
    from fabricamp.module import TrainingModule as TrainingModule
    from fabricamp.ops import clip_grad_norm_ as clip_grad_norm_
    from fabricamp.own_loop import Loop as Loop
    from fabricamp.precision import Float8 as Float8
    from fabricamp.precision import OptLevel as OptLevel
    from fabricamp.rng import seed_everything as seed_everything
    from fabricamp.strategies import DDP as DDP
    from fabricamp.strategies import FSDP as FSDP
    from fabricamp.strategies import DelayedDDP as DelayedDDP
    from fabricamp.trainer import Trainer as Trainer

    LightningDataModule = DataModule
    LightningModule = TrainingModule

__version__ = "0.2.0"

_PARTS = (
    "accelerators",
    "apex",
    "callbacks",
    "core",
    "data",
    "errors",
    "loggers",
    "nn",
    "ops",
    "optimizers",
    "precision",
    "profilers",
    "strategies",
    "trainer",
    "tuner",
    "utilities",
)

_HOMES = {
    "Activations": "fabricamp.activations",
    "Callback": "fabricamp.callbacks.base",
    "CheckpointError": "fabricamp.errors",
    "Compile": "fabricamp.compilation",
    "ConfigError": "fabricamp.errors",
    "CudaGraph": "fabricamp.cuda_graph",
    "DDP": "fabricamp.strategies",
    "FSDP": "fabricamp.strategies",
    "DataModule": "fabricamp.data",
    "DelayedDDP": "fabricamp.strategies",
    "DistributedError": "fabricamp.errors",
    "FabricampError": "fabricamp.errors",
    "LightningDataModule": "fabricamp.data:DataModule",
    "LightningModule": "fabricamp.module:TrainingModule",
    "Loop": "fabricamp.own_loop",
    "NonFiniteError": "fabricamp.errors",
    "Float8": "fabricamp.precision",
    "OptLevel": "fabricamp.precision",
    "Trainer": "fabricamp.trainer",
    "TrainingModule": "fabricamp.module",
    "clip_grad_norm_": "fabricamp.ops",
    "seed_everything": "fabricamp.rng",
}

__all__ = list(_HOMES)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a program that needs one part does not wait for the import of all.
    if name in _HOMES:
        home, _, name_there = _HOMES[name].partition(":")
        return getattr(importlib.import_module(home), name_there or name)
    if name in _PARTS:
        return importlib.import_module(f"fabricamp.{name}")
    from fabricamp.arguments.not_offered import missing

    raise missing("fabricamp", name, (*_HOMES, *_PARTS))


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS])


class _LightningsPaths:
    """The last finder on ``sys.meta_path``: finds paths of Lightning's to fabricamp's classes, which are no files.

    An import of a name that only Lightning has raises an error with what to write instead.
    """

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        if not name.startswith("fabricamp."):
            return None
        from fabricamp.arguments.not_offered import refuse_import

        aliases = importlib.import_module("fabricamp.lightning.aliases")  # on first use, as the parts
        spec: ModuleSpec | None = aliases.spec_of(name)
        if spec is None:
            refuse_import(name)
        return spec


sys.meta_path.append(_LightningsPaths)
