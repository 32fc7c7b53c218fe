# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.strategies``."""

from fabricamp.lightning.packages.fabric.strategies.ddp import DDPStrategy as DDPStrategy
from fabricamp.lightning.packages.fabric.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
from fabricamp.lightning.packages.fabric.strategies.dp import DataParallelStrategy as DataParallelStrategy
from fabricamp.lightning.packages.fabric.strategies.fsdp import FSDPStrategy as FSDPStrategy
from fabricamp.lightning.packages.fabric.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
from fabricamp.lightning.packages.fabric.strategies.parallel import ParallelStrategy as ParallelStrategy
from fabricamp.lightning.packages.fabric.strategies.registry import STRATEGY_REGISTRY as STRATEGY_REGISTRY
from fabricamp.lightning.packages.fabric.strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy
from fabricamp.lightning.packages.fabric.strategies.single_xla import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
from fabricamp.lightning.packages.fabric.strategies.strategy import Strategy as Strategy
from fabricamp.lightning.packages.fabric.strategies.xla import XLAStrategy as XLAStrategy
from fabricamp.lightning.packages.fabric.strategies.xla_fsdp import XLAFSDPStrategy as XLAFSDPStrategy

__all__ = [
    "STRATEGY_REGISTRY",
    "DDPStrategy",
    "DataParallelStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "SingleDeviceXLAStrategy",
    "Strategy",
    "XLAFSDPStrategy",
    "XLAStrategy",
]
