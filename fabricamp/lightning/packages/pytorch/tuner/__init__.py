# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.tuner``."""

from fabricamp.tuner import Tuner as Tuner

__all__ = ["Tuner"]
