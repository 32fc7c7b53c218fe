"""fabricamp: a PyTorch trainer as exact as a hand-written loop, with apex's opt levels and fused kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricamp.callbacks.base import Callback
    from fabricamp.data import DataModule
    from fabricamp.errors import CheckpointError, ConfigError, DistributedError, FabricampError, NonFiniteError
    from fabricamp.module import TrainingModule
    from fabricamp.ops import clip_grad_norm_
    from fabricamp.precision import OptLevel
    from fabricamp.rng import seed_everything
    from fabricamp.strategies import DDP, DelayedDDP
    from fabricamp.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "Callback",
    "CheckpointError",
    "ConfigError",
    "DataModule",
    "DelayedDDP",
    "DistributedError",
    "FabricampError",
    "NonFiniteError",
    "OptLevel",
    "Trainer",
    "TrainingModule",
    "__version__",
    "clip_grad_norm_",
    "seed_everything",
]

_HOMES = {
    "Callback": "fabricamp.callbacks.base",
    "CheckpointError": "fabricamp.errors",
    "ConfigError": "fabricamp.errors",
    "DDP": "fabricamp.strategies",
    "DataModule": "fabricamp.data",
    "DelayedDDP": "fabricamp.strategies",
    "DistributedError": "fabricamp.errors",
    "FabricampError": "fabricamp.errors",
    "NonFiniteError": "fabricamp.errors",
    "OptLevel": "fabricamp.precision",
    "Trainer": "fabricamp.trainer",
    "TrainingModule": "fabricamp.module",
    "clip_grad_norm_": "fabricamp.ops",
    "seed_everything": "fabricamp.rng",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a tool that needs one part does not pay for all of them.
    if name not in _HOMES:
        raise AttributeError(f"module 'fabricamp' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
