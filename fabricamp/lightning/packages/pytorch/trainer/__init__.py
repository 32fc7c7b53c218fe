# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.trainer``."""

from fabricamp.rng import seed_everything as seed_everything
from fabricamp.trainer import Trainer as Trainer

__all__ = ["Trainer", "seed_everything"]
