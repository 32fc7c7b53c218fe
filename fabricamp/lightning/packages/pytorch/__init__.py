"""The names of ``lightning.pytorch``."""

from fabricamp import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from fabricamp.lightning import aliases
from fabricamp.lightning.packages.__about__ import *  # noqa: F403
from fabricamp.lightning.packages.pytorch.__version__ import version as __version__  # noqa: F401 - read as pl.__version__

__path__ = aliases.path_of(__name__)

__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"]
