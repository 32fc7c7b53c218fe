# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.plugins.environments``."""

from fabricamp.lightning.packages.fabric.plugins.environments import ClusterEnvironment as ClusterEnvironment
from fabricamp.lightning.packages.fabric.plugins.environments import KubeflowEnvironment as KubeflowEnvironment
from fabricamp.lightning.packages.fabric.plugins.environments import LightningEnvironment as LightningEnvironment
from fabricamp.lightning.packages.fabric.plugins.environments import LSFEnvironment as LSFEnvironment
from fabricamp.lightning.packages.fabric.plugins.environments import MPIEnvironment as MPIEnvironment
from fabricamp.lightning.packages.fabric.plugins.environments import SLURMEnvironment as SLURMEnvironment
from fabricamp.lightning.packages.fabric.plugins.environments import TorchElasticEnvironment as TorchElasticEnvironment
from fabricamp.lightning.packages.fabric.plugins.environments import XLAEnvironment as XLAEnvironment

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "XLAEnvironment",
]
