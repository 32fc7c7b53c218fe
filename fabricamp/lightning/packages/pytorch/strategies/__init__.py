# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.strategies``."""

import fabricamp.strategies
from fabricamp.lightning.packages.fabric.strategies.registry import STRATEGY_REGISTRY as StrategyRegistry
from fabricamp.lightning.packages.pytorch.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
from fabricamp.lightning.packages.pytorch.strategies.fsdp import FSDPStrategy as FSDPStrategy
from fabricamp.lightning.packages.pytorch.strategies.model_parallel import (
    ModelParallelStrategy as ModelParallelStrategy,
)
from fabricamp.lightning.packages.pytorch.strategies.parallel import ParallelStrategy as ParallelStrategy
from fabricamp.lightning.packages.pytorch.strategies.single_xla import (
    SingleDeviceXLAStrategy as SingleDeviceXLAStrategy,
)
from fabricamp.lightning.packages.pytorch.strategies.xla import XLAStrategy as XLAStrategy
from fabricamp.strategies import *  # noqa: F403

__all__ = [
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceXLAStrategy",
    "StrategyRegistry",
    "XLAStrategy",
]
__all__ += fabricamp.strategies.__all__
