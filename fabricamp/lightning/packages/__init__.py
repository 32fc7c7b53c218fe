"""The modules of Lightning's three packages without a counterpart in fabricamp at the same path; only the alias imports them.

This one has the names of the package ``lightning``, ``pytorch`` those of ``lightning.pytorch`` and ``pytorch_lightning``, and
``fabric`` those of ``lightning.fabric`` and ``lightning_fabric``.
"""

from fabricamp import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from fabricamp.lightning.packages.__about__ import *  # noqa: F403
from fabricamp.lightning.packages.__version__ import version as __version__
from fabricamp.lightning.packages.fabric import Fabric

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "seed_everything",
]
